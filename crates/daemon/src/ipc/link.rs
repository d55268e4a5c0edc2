//! What the supervisor and the serving process say to each other, over one stream each way.
//!
//! ```text
//!   supervisor ── Warm ───────────────────► server     its image is known: what its profile says may come
//!              ── Attach + descriptors ───►            for every mount, again after each restart
//!              ◄── Attached ───────────────             it is served (or why not)
//!              ── Refresh ► ◄── Refreshed ─             what was mapped and pinned meanwhile is seen
//!              ◄── Ended ──────────────────             the kernel has let go of it
//!              ── Record ──► ◄── Recorded ─             what is read is taken note of, or no more
//!              ── Report ──► ◄── Report ───             numbers that only the server knows
//!              ── Stop ───────────────────►             end, and do not wait for a supervisor
//!
//!   orphan   ── Attach + descriptors …, Adopted ────►   to the next supervisor, who connects to
//!   server                                              `run/adopt.sock`
//! ```
//!
//! `Attach` and `Refresh` carry a number that no other message of this supervisor has, and so does
//! their answer. A server of an earlier version knows no `Refresh` and answers without a number: it is
//! told by another `Attach` (`Adopted` says which it is). One that knows them takes an `Attach` of a
//! mount that is served for a refresh, as supervisors of those versions mean it.
//!
//! The descriptors are the slots' and, for a mount over FUSE, before them that of `/dev/fuse`.
//!
//! When the stream ends without `Stop`, the supervisor was killed: the server goes on serving
//! and waits for the next one, because the mounts are still in use.

use std::{os::fd::OwnedFd, path::PathBuf};

use burgeon_source::Location;
use serde::{Deserialize, Serialize};

use crate::{
    id::MountId,
    ipc::protocol::{AreaStatus, CacheStatus, Failure, FillStatus, ProfileStatus},
    state::record::{Attach, ProfileSource, Transport},
};

/// The version of these messages. 1: an `Attach` has no number, and there is no `Refresh`. An
/// upgrade replaces the supervisor first, so each version understands the messages of the one before
/// and ignores those that only later ones have.
pub(crate) const VERSION: u32 = 2;

fn first_version() -> u32 {
    1
}

/// From the supervisor to the server.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "message", rename_all = "kebab-case")]
pub(crate) enum ToServer {
    /// Serve this mount; its descriptors come along. Of one that is served already: see what has
    /// been mapped and pinned meanwhile.
    Attach {
        /// Of the supervisor's messages.
        #[serde(default = "first_version")]
        version: u32,
        /// None from supervisors of earlier versions.
        #[serde(default)]
        number: Option<u64>,
        /// Whether to answer the mount's reads with `EIO` if it cannot be served.
        #[serde(default)]
        refuse: bool,
        #[serde(flatten)]
        attach: Attach,
    },
    /// See what has been mapped into this mount and pinned in it meanwhile.
    Refresh { number: u64, id: MountId },
    /// A mount is being made: bring what its profile says.
    Warm(Warm),
    /// It could not be made.
    Cool { id: MountId },
    /// Begin or end to record what is read; at the end it lies in the mount's folder, as `reads`.
    Record { id: MountId, on: bool },
    /// Say what [`FromServer::Report`] says.
    Report,
    /// End.
    Stop,
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// From the server to the supervisor.
#[derive(Serialize, Deserialize, Debug)]
#[serde(tag = "message", rename_all = "kebab-case")]
#[expect(clippy::large_enum_variant, reason = "a message at a time, never kept")]
pub(crate) enum FromServer {
    /// The answer to an `Attach`.
    Attached {
        id: MountId,
        /// That of the `Attach`; none from servers of earlier versions.
        #[serde(default)]
        number: Option<u64>,
        /// Why it cannot be served, or what was asked for besides cannot be done.
        error: Option<Failure>,
        /// Whether it is served all the same.
        #[serde(default)]
        served: bool,
        /// Whether its reads are answered with `EIO`.
        #[serde(default)]
        refused: bool,
    },
    /// The answer to a `Refresh`.
    Refreshed { id: MountId, number: u64, error: Option<Failure> },
    /// The answer to a `Record`.
    Recorded {
        id: MountId,
        /// Whether it has begun.
        on: bool,
        /// Whether there was more than could be taken note of.
        cut_short: bool,
        error: Option<Failure>,
    },
    /// The kernel has closed the mount's FUSE file.
    Ended { id: MountId },
    /// The answer to a `Report`.
    Report { mounts: Vec<MountReport> },
    /// What an orphan serves: to the supervisor that adopts it.
    Serving(Attach),
    /// All of it has been said.
    Adopted {
        /// Whether the server knows `Refresh`.
        #[serde(default)]
        refreshes: bool,
        /// Of the server's messages.
        #[serde(default = "first_version")]
        version: u32,
    },
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// What there is to know of a mount before it is made.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Warm {
    pub(crate) id: MountId,
    /// The image's address map.
    pub(crate) map: PathBuf,
    /// As in [`Attach`], like the others.
    pub(crate) cache: PathBuf,
    pub(crate) store: Location,
    pub(crate) references: bool,
    pub(crate) profile: ProfileSource,
}

/// What the server knows of a mount beyond its counters.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub(crate) struct MountReport {
    pub(crate) id: MountId,
    /// Bytes of the image's lazy data that are local.
    pub(crate) materialised_bytes: u64,
    /// What the source answered last when it did not give good bytes.
    pub(crate) last_source_error: Option<String>,
    /// The image's cache and what is under way.
    pub(crate) cache: CacheStatus,
    /// How far fetching everything is, if that was asked for.
    pub(crate) fill: Option<FillStatus>,
    /// How bringing what the profile says goes, if that was asked for.
    pub(crate) profile: Option<ProfileStatus>,
    /// How far fetching what is pinned is.
    pub(crate) pinned: Option<FillStatus>,
    /// How the virtual area is, if there is one.
    pub(crate) area: Option<AreaStatus>,
    /// Reads that were refused because of the fetch limit.
    pub(crate) over_limit_reads: u64,
}

/// The descriptors of a mount, as they come with an `Attach`: `/dev/fuse`, if there is one, and
/// the slots. `None` if they are not what the transport has.
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

    /// What a supervisor of version 0.1 sends.
    fn attach_0_1() -> Value {
        json!({
            "message": "attach", "id": "0a1b2c3d", "seed": "/s", "cache": "/c", "store": "/store",
            "references": true, "fsid": "00000000-0000-0000-0000-000000000001", "fill": false,
            "transport": { "kind": "ublk", "number": 7 }, "area": null, "fetch_limit": 9,
            "profile": null, "pins": "/p",
        })
    }

    /// The messages of version 0.1, as it reads them.
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
    fn messages_of_the_version_before_are_understood() {
        let told: ToServer = serde_json::from_value(attach_0_1()).unwrap();
        let ToServer::Attach { version: 1, number: None, refuse: false, attach } = &told else {
            panic!("{told:?}");
        };
        assert_eq!((attach.fetch_limit, attach.transport.device()), (Some(9), Some(7)));
        let says = json!({ "message": "attached", "id": "0a1b2c3d", "error": null });
        let says: FromServer = serde_json::from_value(says).unwrap();
        assert!(matches!(says, FromServer::Attached { number: None, served: false, .. }));
        let says: FromServer = serde_json::from_value(json!({ "message": "adopted" })).unwrap();
        assert!(matches!(says, FromServer::Adopted { refreshes: false, version: 1 }));
    }

    /// A message of each kind, as version 2 writes it, behind the end that takes it.
    const RECORDED: &str = include_str!("link-2.txt");

    #[test]
    fn recorded_messages_are_understood() {
        let (mut told, mut says) = (0, 0);
        for (end, message) in RECORDED.lines().map(|line| line.split_once(' ').unwrap()) {
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
        assert_eq!((told, says), (7, 7));
    }

    #[test]
    fn messages_of_later_versions_are_no_errors() {
        let later = r#"{"message":"levitate","id":"0a1b2c3d","height":[3]}"#;
        assert!(matches!(serde_json::from_str(later).unwrap(), ToServer::Unknown));
        assert!(matches!(serde_json::from_str(later).unwrap(), FromServer::Unknown));
    }

    #[test]
    fn the_version_before_understands_our_messages() {
        let ToServer::Attach { attach, .. } = serde_json::from_value(attach_0_1()).unwrap() else {
            unreachable!()
        };
        let told = ToServer::Attach { version: VERSION, number: Some(3), refuse: true, attach };
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
            },
            FromServer::Adopted { refreshes: true, version: VERSION },
        ];
        let [attached, adopted] =
            says.map(|says| serde_json::from_value(serde_json::to_value(says).unwrap()).unwrap());
        assert!(matches!(attached, Says0_1::Attached { served: true }));
        assert!(matches!(adopted, Says0_1::Adopted));
    }
}
