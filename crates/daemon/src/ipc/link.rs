//! The messages between the supervisor and the server, over one stream in each direction.
//!
//! ```text
//!   supervisor ── Warm ───────────────────► server  start the profile prefetch of a new mount
//!              ── Attach + descriptors ───►         for every mount, again after each restart
//!              ◄── Attached ───────────────         it is served (or why not)
//!              ── Opener + socket ────────►         open files of the host by this opener
//!              ── Refresh ► ◄── Refreshed ─         new mappings and pins are seen
//!              ◄── Ended ──────────────────         the kernel has released it
//!              ── Record ──► ◄── Recorded ─         recording of reads has started or stopped
//!              ── Report ──► ◄── Report ───         numbers that only the server knows
//!              ── Cache ───► ◄── Cache ────         an order about the host's cache is done
//!              ── Waits ──► ◄── Waits ────         the last reads that had to wait
//!              ── Places ─► ◄── Places ───         where the cache holds chunks of a mount
//!              ◄── AskHelper ── HelperSaid ►       run a credential helper
//!              ── Log ───────────────────►         change level and format of the log
//!              ── Stop ───────────────────►         end, and do not wait for a supervisor
//!
//!   orphan   ── Attach + descriptors …, Adopted ──► to the next supervisor, which connects to
//!   server                                          `run/adopt.sock`
//! ```
//!
//! `Attach` and `Refresh` carry a number that no other message of this supervisor has, and so does
//! their answer. A server of an earlier version does not understand `Refresh` and answers without a
//! number: it gets another `Attach` instead (`Adopted` tells them apart). A server that does
//! understand it treats an `Attach` of a served mount as a refresh: earlier supervisors mean
//! that.
//!
//! The descriptors are the slots' and, for a mount over FUSE, before it the one of `/dev/fuse`.
//!
//! When the stream ends without `Stop`, the supervisor was killed: the server goes on serving and
//! waits for the next one, because the mounts are still in use.

use std::{os::fd::OwnedFd, path::PathBuf};

use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use crate::{
    id::MountId,
    ipc::protocol::{
        AreaStatus, CacheAnswer, CacheStatus, ChunkPlaces, DigestText, FillStatus, HostCache,
        ProfileStatus, WaitStatus, WireError,
    },
    state::record::{Attach, ProfileSource, Transport},
};

/// The version of these messages. 1: an `Attach` has no number, and there is no `Refresh`. 2: there
/// is no `Opener`. 3: there is no `Cache`. 4: there is no `Log` and no `Waits`. 5: there is no
/// `AskHelper`. 6: a cache tells of no shared and no fetched bytes. 7: there is no `Places`, and a
/// cache tells of no lent bytes. An upgrade replaces the supervisor first, so each version
/// understands the messages of the previous one and ignores those that only later ones have.
pub(crate) const VERSION: u32 = 8;

/// The rate of a `Scrub` that only ends the one that runs. Earlier servers end it, too, and read
/// nothing more than a chunk.
pub(crate) const END_SCRUB: u64 = 0;

/// The first version whose servers have files opened for them.
const FIRST_WITH_OPENER: u32 = 3;

/// The first version whose servers share a cache.
const FIRST_WITH_CACHE: u32 = 4;

/// The first version whose servers tell where the cache holds chunks.
const FIRST_WITH_PLACES: u32 = 8;

/// The messages that a server understands beyond those of all versions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Understands {
    /// `Refresh`.
    pub(crate) refreshes: bool,
    /// `Opener`.
    pub(crate) opener: bool,
    /// `Cache`.
    pub(crate) cache: bool,
    /// `Places`.
    pub(crate) places: bool,
}

impl Understands {
    /// A server that says this of itself.
    pub(crate) fn as_told(refreshes: bool, version: u32) -> Self {
        let (opener, cache) = (version >= FIRST_WITH_OPENER, version >= FIRST_WITH_CACHE);
        Self { refreshes, opener, cache, places: version >= FIRST_WITH_PLACES }
    }

    /// A server of this very program.
    pub(crate) const ALL: Self = Self { refreshes: true, opener: true, cache: true, places: true };
}

fn first_version() -> u32 {
    1
}

/// From the supervisor to the server.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub(crate) enum ToServer {
    /// Serve this mount; its descriptors are sent along. If it is served already: see new mappings
    /// and pins.
    Attach {
        /// The version of the supervisor's messages.
        #[serde(default = "first_version")]
        version: u32,
        /// Missing from supervisors of earlier versions.
        #[serde(default)]
        number: Option<u64>,
        /// Answer the mount's reads with `EIO` if it cannot be served.
        #[serde(default)]
        refuse: bool,
        /// Device and inode of each folder that the server writes to, as the host sees it: a server
        /// with a root of its own does not see what is mounted there later. Missing from
        /// supervisors of earlier versions.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        folders: Vec<Option<(u64, u64)>>,
        #[serde(flatten)]
        attach: Attach,
    },
    /// Open files of this host by the opener at the other end of the socket that is sent along.
    Opener,
    /// See new mappings and pins of this mount.
    Refresh { number: u64, id: MountId },
    /// A mount is being made: prefetch its profile's data.
    Warm(Warm),
    /// That mount could not be made.
    Cool { id: MountId },
    /// Start or stop recording reads; at the end they are in the mount's folder, as `reads`.
    Record { id: MountId, on: bool },
    /// Send a [`FromServer::Report`].
    Report,
    /// Do something with the host's cache; servers of earlier versions have none.
    Cache { number: u64, order: CacheOrder },
    /// Change level and format of the log; servers of earlier versions keep theirs.
    Log { level: String, json: bool },
    /// List the last reads of the mount that had to wait, after number `after`.
    Waits { number: u64, id: MountId, after: u64 },
    /// Name the places of the mount's chunks in the host's cache, from chunk `first` on.
    Places { number: u64, id: MountId, first: u32 },
    /// The answer to an `AskHelper`: the helper's output, or the reason why there is none.
    HelperSaid { number: u64, said: Result<String, String> },
    /// End.
    Stop,
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// An order of a user about the host's cache.
#[derive(Serialize, Deserialize, Debug, Clone)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub(crate) enum CacheOrder {
    /// Nothing but its figures.
    Show,
    /// See the settings, which have changed.
    Resize,
    /// Free so many bytes.
    Evict { bytes: u64 },
    /// Forget the chunks of an image.
    Drop { digest: DigestText },
    /// Read every chunk.
    Scrub { bytes_per_second: u64 },
    /// An order of a later version.
    #[serde(other)]
    Unknown,
}

/// From the server to the supervisor.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub(crate) enum FromServer {
    /// The answer to an `Attach`.
    Attached {
        id: MountId,
        /// The number of the `Attach`; missing from servers of earlier versions.
        #[serde(default)]
        number: Option<u64>,
        /// The reason why it cannot be served, or why another part of the request failed.
        error: Option<WireError>,
        /// It is served despite the error.
        #[serde(default)]
        served: bool,
        /// Its reads are answered with `EIO`.
        #[serde(default)]
        refused: bool,
        /// The process that has opened its ublk device; missing over FUSE, and from servers of
        /// earlier versions, which open it themselves.
        #[serde(default)]
        opener: Option<u32>,
    },
    /// The answer to a `Refresh`.
    Refreshed { id: MountId, number: u64, error: Option<WireError> },
    /// The answer to a `Record`.
    Recorded {
        id: MountId,
        /// Recording has started.
        on: bool,
        /// There were more reads than fit.
        cut_short: bool,
        error: Option<WireError>,
    },
    /// The kernel has closed the mount's FUSE file.
    Ended {
        id: MountId,
        /// The image's map is damaged; missing from servers of earlier versions, which mark its
        /// folder themselves.
        #[serde(default)]
        is_damaged: bool,
    },
    /// The answer to a `Report`.
    Report {
        mounts: Vec<MountReport>,
        /// The host's cache; missing from servers of earlier versions.
        #[serde(default)]
        cache: Option<HostCache>,
    },
    /// The answer to a `Cache`.
    Cache { number: u64, answer: CacheAnswer, error: Option<WireError> },
    /// The answer to a `Waits`.
    Waits { number: u64, waits: Vec<WaitStatus> },
    /// The answer to a `Places`.
    Places { number: u64, places: ChunkPlaces },
    /// Run the credential helper of this name, without `docker-credential-`, for a registry. The
    /// server may execute nothing.
    AskHelper { number: u64, helper: String, registry: String },
    /// A mount that an orphan serves: to the supervisor that adopts it.
    Serving(Attach),
    /// The end of the `Serving` messages.
    Adopted {
        /// The server understands `Refresh`.
        #[serde(default)]
        refreshes: bool,
        /// The version of the server's messages.
        #[serde(default = "first_version")]
        version: u32,
    },
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// The known properties of a mount before it is made.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Warm {
    pub(crate) id: MountId,
    /// The image's address map.
    pub(crate) map: PathBuf,
    /// This and the following fields are as in [`Attach`].
    pub(crate) cache: PathBuf,
    pub(crate) store: Location,
    pub(crate) references: bool,
    pub(crate) profile: ProfileSource,
}

/// The server's knowledge of a mount beyond its counters.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct MountReport {
    pub(crate) id: MountId,
    /// Bytes of the image's lazy data that are local.
    pub(crate) materialised_bytes: u64,
    /// The source's last answer that was not valid data.
    pub(crate) last_source_error: Option<String>,
    /// The image's cache and its in-flight fetches.
    pub(crate) cache: CacheStatus,
    /// Progress of fetching everything, if requested.
    pub(crate) fill: Option<FillStatus>,
    /// Progress of the profile prefetch, if requested.
    pub(crate) profile: Option<ProfileStatus>,
    /// Progress of fetching the pins.
    pub(crate) pinned: Option<FillStatus>,
    /// State of the virtual area, if there is one.
    pub(crate) area: Option<AreaStatus>,
    /// Reads that were refused because of the fetch limit.
    pub(crate) over_limit_reads: u64,
}

/// Sorts the descriptors of an `Attach`: `/dev/fuse`, if there is one, and the slots. `None` if
/// they do not fit the transport.
pub(crate) fn sort_descriptors(
    transport: Transport,
    fds: Vec<OwnedFd>,
) -> Option<(Option<OwnedFd>, OwnedFd)> {
    let mut fds = fds.into_iter();
    let fuse = match transport {
        Transport::Fuse | Transport::Rings { .. } => Some(fds.next()?),
        Transport::Ublk { .. } => None,
    };
    let slots = fds.next()?;
    fds.next().is_none().then_some((fuse, slots))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Attach, FromServer, ToServer, VERSION};

    /// An `Attach` from a supervisor of version 0.1.
    fn attach_0_1() -> Value {
        json!({
            "message": "attach", "id": "0a1b2c3d", "seed": "/s", "cache": "/c", "store": "/store",
            "references": true, "fsid": "00000000-0000-0000-0000-000000000001", "fill": false,
            "transport": { "kind": "ublk", "number": 7 }, "area": null, "fetch_limit": 9,
            "profile": null, "pins": "/p",
        })
    }

    /// The messages of version 0.1, as that version reads them.
    #[derive(serde::Deserialize)]
    #[serde(tag = "message", rename_all = "kebab-case")]
    enum Told0_1 {
        Attach(Attach),
    }
    #[derive(serde::Deserialize)]
    #[serde(tag = "message", rename_all = "kebab-case")]
    enum Says0_1 {
        Attached { served: bool },
        Adopted,
    }

    #[test]
    fn messages_of_the_previous_version_are_understood() {
        let told: ToServer = serde_json::from_value(attach_0_1()).unwrap();
        let ToServer::Attach { version: 1, number: None, refuse: false, attach, .. } = &told else {
            panic!("{told:?}");
        };
        assert_eq!((attach.fetch_limit, attach.transport.device()), (Some(9), Some(7)));
        let says = json!({ "message": "attached", "id": "0a1b2c3d", "error": null });
        let says: FromServer = serde_json::from_value(says).unwrap();
        assert!(matches!(says, FromServer::Attached { number: None, served: false, .. }));
        let says: FromServer = serde_json::from_value(json!({ "message": "adopted" })).unwrap();
        assert!(matches!(says, FromServer::Adopted { refreshes: false, version: 1 }));
    }

    /// A message of each kind, as versions 2 to 8 write it, after its receiver.
    const RECORDED: [&str; 7] = [
        include_str!("link-2.txt"),
        include_str!("link-3.txt"),
        include_str!("link-4.txt"),
        include_str!("link-5.txt"),
        include_str!("link-6.txt"),
        include_str!("link-7.txt"),
        include_str!("link-8.txt"),
    ];

    #[test]
    fn recorded_messages_are_understood() {
        let (mut told, mut says) = (0, 0);
        let lines = RECORDED.iter().flat_map(|version| version.lines());
        for (end, message) in lines.map(|line| line.split_once(' ').unwrap()) {
            if end == "server" {
                let message = serde_json::from_str(message).unwrap();
                assert!(!matches!(message, ToServer::Unknown), "{message:?}");
                told += 1;
            } else {
                let message = serde_json::from_str(message).unwrap();
                assert!(!matches!(message, FromServer::Unknown), "{message:?}");
                says += 1;
            }
        }
        assert_eq!((told, says), (7 + 8 + 9 + 11 + 12 + 12 + 13, 7 + 7 + 8 + 9 + 10 + 10 + 11));
    }

    /// Version 8 is this one: a change of its messages that other versions would see is a new
    /// version, with a record of its own.
    #[test]
    fn recorded_messages_of_this_version_are_written_the_same() {
        assert_eq!(VERSION, 8);
        for (end, message) in RECORDED[6].lines().map(|line| line.split_once(' ').unwrap()) {
            let recorded: Value = serde_json::from_str(message).unwrap();
            let written = match end {
                "server" => {
                    serde_json::to_value(serde_json::from_str::<ToServer>(message).unwrap())
                }
                _ => serde_json::to_value(serde_json::from_str::<FromServer>(message).unwrap()),
            };
            assert_eq!(written.unwrap(), recorded);
        }
    }

    #[test]
    fn messages_of_later_versions_are_no_errors() {
        let later = r#"{"message":"levitate","id":"0a1b2c3d","height":[3]}"#;
        assert!(matches!(serde_json::from_str(later).unwrap(), ToServer::Unknown));
        assert!(matches!(serde_json::from_str(later).unwrap(), FromServer::Unknown));
    }

    #[test]
    fn the_previous_version_understands_our_messages() {
        let ToServer::Attach { attach, .. } = serde_json::from_value(attach_0_1()).unwrap() else {
            unreachable!()
        };
        let folders = vec![Some((1, 2))];
        let told =
            ToServer::Attach { version: VERSION, number: Some(3), refuse: true, folders, attach };
        let Told0_1::Attach(attach) =
            serde_json::from_value(serde_json::to_value(&told).unwrap()).unwrap();
        assert_eq!(attach.fetch_limit, Some(9));
        let says = [
            FromServer::Attached {
                id: attach.id,
                number: Some(3),
                error: None,
                served: true,
                refused: false,
                opener: Some(7),
            },
            FromServer::Adopted { refreshes: true, version: VERSION },
        ];
        let [attached, adopted] =
            says.map(|says| serde_json::from_value(serde_json::to_value(says).unwrap()).unwrap());
        assert!(matches!(attached, Says0_1::Attached { served: true }));
        assert!(matches!(adopted, Says0_1::Adopted));
    }
}
