//! What an image is turned into before it can be mounted, once an image and host.
//!
//! ```text
//!   images/<digest>/   seed        the template: metadata nodes under an fsid of zeros
//!                      seed.info   what superblocks and patching need
//!                      map         address ──► chunk, block checksums
//!                      manifest    the image itself, so that named writes need no store for it
//!                      ready.json  written last: says that the others are whole
//!                      cache       the lazy data that has been read
//!                      checksums   of what is in the cache, if the map has none
//!                      virtual-<bytes>/   the same but the cache, with a virtual area of that size
//! ```
//!
//! Nothing here is synced, because all of it can be made anew: `ready.json` names the boot it was
//! written in and the length of each, and after another boot, or if one has another length, the files
//! are made again; so they are when a server cannot use them (`mend.rs`). What named writes are made on is
//! linked into their folder and synced there ([`keep`]).

mod mend;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
};

use burgeon_block::{ByteRange, Digest, Error, ErrorKind, Result};
use burgeon_btrfs::{DeviceNo, Identity, Patcher, SeedInfo, superblock, superblock_offsets};
use burgeon_image::{Limits, catalog};
use burgeon_source::{Access, Location, Store};
use serde::{Deserialize, Serialize};

pub(crate) use self::mend::{mend, mend_kept};
use crate::{
    host::harden::bound_memory,
    ipc::protocol::{Failure, MountRequest},
    roles,
    start::this_program,
    state::{
        built,
        files::{self, Lock},
        id::Fsid,
        images,
        paths::StateDir,
        writes::{self, RECORD_FORMAT, Record},
    },
};

/// Changes whenever these files do: those of another version are made anew.
const READY_FORMAT: u32 = 1;

/// Nodes are copied so many bytes at a time: it fits a CPU's second-level cache.
const COPY_LEN: u64 = 1 << 20;

/// Threads that copy. Copying is bound by memory, not by CPUs.
const COPY_THREADS: u64 = 2;

/// The files that are kept with named writes.
const KEPT: [&str; 4] = ["seed", "seed.info", "map", "manifest"];

/// A folder from which an image can be mounted.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(crate) folder: PathBuf,
    /// The manifest's digest.
    pub(crate) digest: Digest,
}

#[derive(Serialize, Deserialize, PartialEq, Eq)]
struct Ready {
    format: u32,
    version: String,
    boot: String,
    /// Where it was prepared from.
    store: Location,
    /// The lengths of the files; those of earlier versions have none, and are made anew.
    #[serde(default)]
    lens: BTreeMap<String, u64>,
}

impl Ready {
    /// What is said of the files in `folder` as they are now.
    fn now(store: &Location, folder: &Path) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self {
            format: READY_FORMAT,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            boot: boot.trim().to_owned(),
            store: store.clone(),
            lens: Self::lens(folder),
        }
    }

    fn lens(folder: &Path) -> BTreeMap<String, u64> {
        let len = |file: &str| fs::metadata(folder.join(file)).map(|file| file.len()).ok();
        KEPT.iter().filter_map(|file| Some(((*file).to_owned(), len(file)?))).collect()
    }
}

/// The manifest of the image that is wanted from `store`. `NotFound` says which names there are.
pub(crate) fn resolve(store: &Store, request: &MountRequest) -> Result<Digest> {
    match request.digest {
        Some(digest) => Ok(digest.0),
        // Whoever can write to the store can give it there; a client that knows it says the digest.
        None if catalog::is_reserved(&request.image) => {
            let what = format!("this host knows no image {:?} that it has checked", request.image);
            Err(Error::new(ErrorKind::NotFound, what))
        }
        None => catalog::resolve(store, &request.image)?.digest(),
    }
}

/// Prepares the image `digest` of `store` with a virtual area of `virtual_bytes` (0: none), unless
/// that has been done. Calls `mapped` with the address map as soon as it is there: data can come
/// while the rest is being made.
pub(crate) fn prepare(
    state: &StateDir,
    store: &Location,
    access: &Access,
    digest: Digest,
    virtual_bytes: u64,
    mapped: impl FnOnce(&Path),
) -> Result<Prepared> {
    let mut mapped = Some(mapped);
    let mut folder = state.image(&digest);
    if virtual_bytes > 0 {
        make_folder(&folder)?;
        folder.push(format!("virtual-{virtual_bytes}"));
    }
    if !is_ready(&folder, store) {
        make_folder(&folder)?;
        // Two mounts of a new image at once prepare it once.
        let _lock = Lock::take(&folder.join("lock"))?;
        if !is_ready(&folder, store) {
            let map = folder.join("map");
            let on_map = || mapped.take().into_iter().for_each(|mapped| mapped(&map));
            run_process(store, access, &digest, &folder, Wanted::Seed { virtual_bytes }, on_map)?;
        }
    }
    if let Some(mapped) = mapped {
        mapped(&folder.join("map"));
    }
    Ok(Prepared { folder, digest })
}

/// Fetches what it takes to mount the image `digest` of `store`, so that the next mount need not.
pub fn make_ready(
    state: &StateDir,
    store: &Location,
    access: &Access,
    digest: Digest,
) -> Result<()> {
    prepare(state, store, access, digest, 0, |_| {}).map(drop)
}

/// Whether `folder` holds all of an image, prepared since the machine was started.
fn is_ready(folder: &Path, store: &Location) -> bool {
    let ready = files::read_json::<Ready>(&folder.join("ready.json"));
    let now = Ready::now(store, folder);
    // The same image of another store is the same image.
    now.lens.len() == KEPT.len()
        && read_info(folder).is_ok()
        && ready.is_ok_and(|ready| Ready { store: store.clone(), ..ready } == now)
}

/// Puts the address map of the image `digest` of `store` into `folder`, durably.
pub(crate) fn keep_map(
    state: &StateDir,
    store: &Location,
    access: &Access,
    digest: Digest,
    folder: &Path,
) -> Result<()> {
    let prepared = state.image(&digest);
    // Its cache will lie there, too.
    make_folder(&prepared)?;
    let _lock = Lock::take(&prepared.join("lock"))?;
    if is_ready(&prepared, store) {
        return keep_file(&prepared, folder, "map")
            .and_then(|()| files::sync_parent(&folder.join("map")));
    }
    run_process(store, access, &digest, folder, Wanted::Map, || {})
}

/// What a process prepares.
#[derive(Clone, Copy)]
enum Wanted {
    /// All it takes to mount the image, with a virtual area of so many bytes (0: none).
    Seed { virtual_bytes: u64 },
    /// The same, unless it is there and usable.
    Mended { virtual_bytes: u64 },
    /// The address map alone, durably.
    Map,
}

/// What the named writes of `record` were made on. Files that are missing or cut short are made
/// again from the image in `store`.
pub(crate) fn kept(
    state: &StateDir,
    store: &Location,
    access: &Access,
    record: &Record,
) -> Result<Prepared> {
    let folder = writes::folder(state, &record.name);
    if !is_complete(&folder, record) {
        mend_kept(state, store, access, record)?;
    }
    Ok(Prepared { folder, digest: record.manifest.0 })
}

/// Whether the files in `folder` have the lengths that they were made with, as far as those are
/// known: what is damaged besides is found by whoever reads it.
fn is_complete(folder: &Path, record: &Record) -> bool {
    let len = |file: &str| fs::metadata(folder.join(file)).map_or(0, |file| file.len());
    len("seed") == record.template_len
        && (len("map") == record.map_len || (record.map_len == 0 && len("map") > 0))
        && len("manifest") > 0
        && read_info(folder).is_ok()
}

/// The record of new named writes on `base`.
pub(crate) fn record(
    base: &Prepared,
    seed_fsid: Fsid,
    name: &str,
    request: &MountRequest,
) -> Result<Record> {
    let (template_digest, template_len) = digest_file(&base.folder.join("seed"))?;
    let (map_digest, map_len) = digest_file(&base.folder.join("map"))?;
    Ok(Record {
        format: RECORD_FORMAT,
        name: name.to_owned(),
        image: request.image.clone(),
        manifest: base.digest.into(),
        store: request.store.clone(),
        seed_fsid,
        template_digest: template_digest.into(),
        template_len,
        map_digest: map_digest.into(),
        map_len,
        device: None,
        limit: 0,
        thin: false,
        sprouted: false,
        sprout_fsid: None,
        virtual_bytes: request.virtual_bytes,
    })
}

/// Keeps what a mount is made of in `folder`, durably, whatever becomes of the image.
pub(crate) fn keep(base: &Prepared, folder: &Path) -> Result<()> {
    KEPT.iter().try_for_each(|file| keep_file(&base.folder, folder, file))?;
    files::sync_parent(&folder.join(KEPT[0]))
}

/// The same for one `file`, but for its name's durability.
fn keep_file(from: &Path, folder: &Path, file: &str) -> Result<()> {
    let to = folder.join(file);
    writes::keep(&from.join(file), &to)?;
    File::open(&to)
        .and_then(|file| file.sync_all())
        .map_err(|e| Error::io(format!("cannot sync {}", to.display()), e))
}

/// BLAKE3 and length of a file.
pub(crate) fn digest_file(path: &Path) -> Result<(Digest, u64)> {
    let failed = |e| Error::io(format!("cannot read {}", path.display()), e);
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; COPY_LEN as usize];
    let mut total = 0;
    loop {
        let len = file.read(&mut buffer).map_err(failed)?;
        if len == 0 {
            return Ok((hasher.finalize().into(), total));
        }
        hasher.update(&buffer[..len]);
        total += len as u64;
    }
}

/// What a copy of the seed for one mount is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seed {
    /// What superblocks and patching needed.
    pub(crate) info: SeedInfo,
    /// Bytes of metadata nodes.
    pub(crate) metadata_bytes: u64,
}

/// Makes `to`, a copy of the seed of `base` under the fsid `fsid`: at memory speed, and without
/// mending a node that has rotted.
pub(crate) fn personalise(base: &Prepared, fsid: Fsid, to: &Path) -> Result<Seed> {
    let info = read_info(&base.folder)?;
    let identity = Identity { fsid: fsid.0 };
    let template = base.folder.join("seed");
    let from = File::open(&template)
        .map_err(|e| Error::io(format!("cannot open {}", template.display()), e))?;
    let failed = |e| Error::io(format!("cannot make {}", to.display()), e);
    // A spare of the same writes lies there already: it is written over, in its own blocks.
    let mut options = File::options();
    let file = files::open(to, options.read(true).write(true).create(true).truncate(false));
    let file = file.map_err(failed)?;
    crate::state::space::forbid_copy_on_write(&file);
    file.set_len(info.metadata_device_size()).map_err(failed)?;
    let patcher = Patcher::new(&info, &identity);
    for nodes in [info.chunk_nodes(), info.metadata_nodes()] {
        copy_nodes(&patcher, nodes, &from, &file).map_err(|e| {
            Error::with_source(e.kind(), format!("cannot copy {}", template.display()), e)
        })?;
    }
    for (mirror, offset) in superblock_offsets(&info, DeviceNo::Metadata).iter().enumerate() {
        if let Some(block) = superblock(&info, &identity, DeviceNo::Metadata, mirror) {
            file.write_all_at(&block, *offset).map_err(failed)?;
        }
    }
    let metadata_bytes = info.chunk_nodes().len() + info.metadata_nodes().len();
    Ok(Seed { info, metadata_bytes })
}

/// The description of the seed in `folder`.
pub(crate) fn read_info(folder: &Path) -> Result<SeedInfo> {
    let path = folder.join("seed.info");
    let bytes =
        fs::read(&path).map_err(|e| Error::io(format!("cannot read {}", path.display()), e))?;
    SeedInfo::from_bytes(&bytes)
}

fn copy_nodes(patcher: &Patcher, nodes: ByteRange, from: &File, to: &File) -> Result<()> {
    let pieces = nodes.len().div_ceil(COPY_LEN);
    let copy = |thread: u64| -> Result<()> {
        let mut buffer = vec![0; COPY_LEN as usize];
        for piece in (thread..pieces).step_by(COPY_THREADS as usize) {
            let start = nodes.start() + piece * COPY_LEN;
            let buffer = &mut buffer[..COPY_LEN.min(nodes.end() - start) as usize];
            let failed = |e| Error::io(format!("bytes from {start} on"), e);
            from.read_exact_at(buffer, start).map_err(failed)?;
            patcher.patch(start, buffer)?;
            to.write_all_at(buffer, start).map_err(failed)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            (1..COPY_THREADS.min(pieces)).map(|thread| scope.spawn(move || copy(thread))).collect();
        let mut result = copy(0);
        for other in others {
            let other = other.join().unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::LocalIo, "a copying thread ended early"))
            });
            result = result.and(other);
        }
        result
    })
}

/// Removes what has been prepared from `store` and is not in `keep`: what no image there is, no
/// mount uses, and no writes were made on. Returns how many images' worth that was, and its
/// bytes.
pub fn sweep(
    state: &StateDir,
    store: &Location,
    keep: &[Digest],
    dry_run: bool,
) -> Result<(u64, u64)> {
    let (mut images, mut bytes) = (0, 0);
    if !dry_run {
        built::sweep(state, store, keep)?;
    }
    // Of these only the cache is there, which does not say from which store it is.
    let mapped = images::all(state)?;
    let folders = fs::read_dir(state.images())
        .map_err(|e| Error::io(format!("cannot list {}", state.images().display()), e))?;
    for folder in folders.flatten().map(|entry| entry.path()) {
        let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Ok(digest) = name.parse::<Digest>() else { continue };
        let ready = files::read_json::<Ready>(&folder.join("ready.json"));
        let elsewhere = ready.is_ok_and(|ready| ready.store != *store);
        if keep.contains(&digest) || mapped.iter().any(|image| image.digest == digest) || elsewhere
        {
            continue;
        }
        images += 1;
        bytes += allocated(&folder);
        if !dry_run {
            files::remove_folder(&folder)?;
            files::remove_file(&state.profile(&digest))?;
        }
    }
    Ok((images, bytes))
}

/// Bytes that the files of a folder take.
fn allocated(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks() * 512).sum()
}

/// Makes a private folder where there is none.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::io(format!("cannot make {}", path.display()), e))
        }
        _ => Ok(()),
    }
}

/// Prepares in a process of its own: describing a million files takes memory, which must not
/// stay with the supervisor.
fn run_process(
    store: &Location,
    access: &Access,
    digest: &Digest,
    folder: &Path,
    wanted: Wanted,
    on_map: impl FnOnce(),
) -> Result<()> {
    let mut command = this_program("__prepare");
    // All of these variables are the request's: half of another set would be worse than none.
    for (name, _) in Access::from_env().variables() {
        command.env_remove(name);
    }
    let failed = |e| Error::io("cannot start a process that prepares the image", e);
    let mut child = command
        .arg(store.to_string())
        .envs(access.variables())
        .arg(digest.to_string())
        .arg(folder)
        .arg(match wanted {
            Wanted::Seed { virtual_bytes } => virtual_bytes.to_string(),
            Wanted::Mended { virtual_bytes } => format!("{MENDED}{virtual_bytes}"),
            Wanted::Map => ONLY_MAP.to_owned(),
        })
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(failed)?;
    let mut on_map = Some(on_map);
    let mut failure = None;
    for line in child.stdout.take().map(BufReader::new).into_iter().flat_map(BufRead::lines) {
        match line.map_err(failed)? {
            line if line == MAPPED => on_map.take().into_iter().for_each(|on_map| on_map()),
            line => failure = serde_json::from_str::<Failure>(&line).ok(),
        }
    }
    let status = child.wait().map_err(failed)?;
    if status.success() {
        return Ok(());
    }
    Err(failure.map(Error::from).unwrap_or_else(|| {
        let what = format!(
            "the process that prepares the image ended early ({status}): it was killed, or needed \
             more memory than an image of that size does; see the log of the daemon"
        );
        Error::new(ErrorKind::LocalIo, what)
    }))
}

/// What `__prepare` prints when the address map is there.
const MAPPED: &str = "mapped";

/// How `__prepare` is asked for [`Wanted::Map`].
const ONLY_MAP: &str = "map";

/// What precedes the bytes when `__prepare` is asked for [`Wanted::Mended`].
const MENDED: &str = "mended-";

/// The whole life of the process `burgeon __prepare STORE DIGEST FOLDER VIRTUAL-BYTES`, or with
/// `map` in the place of the bytes, or `mended-` before them.
pub fn prepare_process(arguments: &[OsString]) -> ExitCode {
    // The supervisor must not be ended for memory that a manifest of others takes.
    let accepted = burgeon_sandbox::accept_the_oom_killer();
    let prepared = accepted.and_then(|()| match arguments {
        [store, digest, folder, wanted] => prepare_here(store, digest, folder.as_ref(), wanted),
        _ => Err(Error::new(
            ErrorKind::Invalid,
            "__prepare takes a store, a digest, a folder and a size",
        )),
    });
    match prepared {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("{}", serde_json::to_string(&Failure::from(e)).unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

fn prepare_here(
    store: &OsString,
    digest: &OsString,
    folder: &Path,
    wanted: &OsString,
) -> Result<()> {
    let store = Location::parse(&store.to_string_lossy())?;
    let digest: Digest = digest.to_string_lossy().parse()?;
    let limits = Limits::default();
    bound_memory(limits.bytes_max);
    // It names the boot, which nothing in the sandbox can be asked for.
    let ready = Ready::now(&store, folder);
    roles::preparing(&store, folder).enter()?;
    roles::do_without_helpers();
    if wanted == ONLY_MAP {
        let open = Store::open(&store, &Access::from_env())?;
        return burgeon_image::prepare_map(&open, &digest, folder, &limits, bound_memory);
    }
    let wanted = wanted.to_string_lossy();
    let mended = wanted.strip_prefix(MENDED);
    if mended.is_some() && mend::is_usable(folder) {
        return Ok(());
    }
    let virtual_bytes = mended.unwrap_or(&wanted).parse().map_err(|e| {
        Error::with_source(ErrorKind::Invalid, "the size of the virtual area is no number", e)
    })?;
    for file in KEPT.iter().chain(&["ready.json"]) {
        files::remove_file(&folder.join(file))?;
    }
    burgeon_image::prepare(
        &Store::open(&store, &Access::from_env())?,
        &digest,
        folder,
        virtual_bytes,
        &limits,
        bound_memory,
        || println!("{MAPPED}"),
    )?;
    let ready = Ready { lens: Ready::lens(folder), ..ready };
    files::publish_json(&folder.join("ready.json"), &ready)
}
