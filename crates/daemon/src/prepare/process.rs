//! The process that prepares an image: its start, and its main function.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
    process::{ExitCode, Stdio},
};

use burgeon_block::{Digest, Error, ErrorKind, ObjectKind, ObjectStore, Result};
use burgeon_image::{AddressMap, ManifestLimits, Wanted};
use burgeon_source::{Access, Location, Store};

use crate::{
    host::{harden::bound_memory, program::this_program},
    ipc::protocol::WireError,
    roles,
    state::{
        complete::SUMS,
        files,
        prepared::{KEPT, Ready, len_of, read_info},
    },
};

/// The files to prepare.
#[derive(Clone, Copy)]
pub(super) enum PreparedFiles {
    /// All files needed to mount the image, with a virtual area of this many bytes (0: none).
    Seed { virtual_bytes: u64 },
    /// The same, unless they exist and are usable.
    Mended { virtual_bytes: u64 },
    /// The address map alone, durably.
    Map,
}

/// Prepares in a process of its own: describing a million files takes memory that must not stay
/// allocated in the supervisor.
pub(super) fn run_process(
    store: &Location,
    access: &Access,
    digest: &Digest,
    folder: &Path,
    files: PreparedFiles,
    on_map: impl FnOnce(),
) -> Result<()> {
    let mut command = this_program("__prepare");
    // All of these variables come from the request: a mixture of two sets would be worse than none.
    for (name, _) in Access::from_parent().variables() {
        command.env_remove(name);
    }
    let failed = |e| Error::io("cannot start a process that prepares the image", e);
    let mut child = command
        .arg(store.to_string())
        .envs(access.variables())
        .arg(digest.to_string())
        .arg(folder)
        .arg(match files {
            PreparedFiles::Seed { virtual_bytes } => virtual_bytes.to_string(),
            PreparedFiles::Mended { virtual_bytes } => format!("{MENDED}{virtual_bytes}"),
            PreparedFiles::Map => ONLY_MAP.to_owned(),
        })
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(failed)?;
    let heard = child.stdout.take().map_or(Ok(None), |stdout| listen(stdout, on_map));
    if heard.is_err() {
        // It may be in the hands of the image's publisher, and not end by itself.
        child.kill().map_err(failed)?;
    }
    let status = child.wait().map_err(failed)?;
    let failure = heard.map_err(|e| {
        Error::io("cannot understand the process that prepares the image: it was ended", e)
    })?;
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

/// Calls `on_map` when the process says that the address map exists, and returns the failure that
/// it tells. An error for more than [`SAID_MAX`] bytes.
fn listen(said: impl Read, on_map: impl FnOnce()) -> io::Result<Option<WireError>> {
    let (mut on_map, mut failure) = (Some(on_map), None);
    let mut said = said.take(SAID_MAX + 1);
    for line in BufReader::new(&mut said).lines() {
        match line? {
            line if line == MAPPED => on_map.take().into_iter().for_each(|on_map| on_map()),
            line => failure = serde_json::from_str::<WireError>(&line).ok(),
        }
    }
    match said.limit() {
        0 => Err(io::Error::new(io::ErrorKind::InvalidData, "it says too much")),
        _ => Ok(failure),
    }
}

/// Most bytes that `__prepare` prints: it parses what strangers made, so nobody relies on it.
const SAID_MAX: u64 = 64 << 10;

/// `__prepare` prints this when the address map exists.
const MAPPED: &str = "mapped";

/// The argument of `__prepare` for [`PreparedFiles::Map`].
const ONLY_MAP: &str = "map";

/// The prefix of the bytes for [`PreparedFiles::Mended`].
const MENDED: &str = "mended-";

/// The main function of the process `burgeon __prepare STORE DIGEST FOLDER VIRTUAL-BYTES`, or with
/// `map` in place of the bytes, or `mended-` before them.
pub fn prepare_process(arguments: &[OsString]) -> ExitCode {
    // The OOM killer must not end the supervisor for memory that an untrusted manifest takes.
    let accepted = burgeon_sandbox::accept_the_oom_killer();
    let prepared = accepted.and_then(|()| match arguments {
        [store, digest, folder, files] => prepare_here(store, digest, folder.as_ref(), files),
        _ => Err(Error::new(
            ErrorKind::Invalid,
            "__prepare takes a store, a digest, a folder and a size",
        )),
    });
    match prepared {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            println!("{}", serde_json::to_string(&WireError::from(e)).unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

fn prepare_here(
    store: &OsString,
    digest: &OsString,
    folder: &Path,
    files: &OsString,
) -> Result<()> {
    let store = Location::parse(&store.to_string_lossy())?;
    let digest: Digest = digest.to_string_lossy().parse()?;
    let limits = ManifestLimits::default();
    bound_memory(limits.bytes_max);
    // It names the boot, which cannot be read inside the sandbox.
    let ready = Ready::now(&store, folder);
    roles::preparing(&store, folder).enter()?;
    roles::do_without_helpers();
    if files == ONLY_MAP {
        let open = Store::open(&store, &Access::from_parent())?;
        return burgeon_image::prepare_map(&open, &digest, folder, &limits, bound_memory);
    }
    let files = files.to_string_lossy();
    let mended = files.strip_prefix(MENDED);
    if mended.is_some() && is_usable(folder) {
        return Ok(());
    }
    let virtual_bytes = mended.unwrap_or(&files).parse().map_err(|e| {
        Error::with_source(ErrorKind::Invalid, "the size of the virtual area is not a number", e)
    })?;
    let open = Store::open(&store, &Access::from_parent())?;
    let manifest = ObjectKind::Manifest.object(digest)?;
    // Damaged files may still serve: they go only if the image is there to make them again.
    if mended.is_some() && open.len(&manifest)?.is_none() {
        let what = format!("the store {store} has no {manifest}");
        return Err(Error::new(ErrorKind::NotFound, what));
    }
    for file in KEPT.iter().chain(&["ready.json"]) {
        let path = folder.join(file);
        match path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            true => files::remove_folder(&path)?,
            false => files::remove_file(&path)?,
        }
    }
    let wanted = Wanted { virtual_bytes, checksums: checksums_in(folder)? };
    burgeon_image::prepare(&open, &digest, folder, wanted, &limits, bound_memory, || {
        println!("{MAPPED}")
    })?;
    let ready = ready.with_files(folder);
    files::publish_json(&folder.join("ready.json"), &ready)
}

/// The checksums of a complete copy of the image's data, if the folder is that of one.
fn checksums_in(folder: &Path) -> Result<Option<File>> {
    let path = folder.join(SUMS);
    match files::open(&path, File::options().read(true)) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("cannot open {}", path.display()), e)),
    }
}

/// True if an image can be mounted from `folder`, and the mount be served. Checked in a process of
/// its own, because the map can have any length.
fn is_usable(folder: &Path) -> bool {
    let map = AddressMap::open(&folder.join("map")).and_then(|map| map.verify());
    let info = map.and_then(|()| read_info(folder));
    let (seed, manifest) = (len_of(&folder.join("seed")), len_of(&folder.join("manifest")));
    manifest > 0 && info.is_ok_and(|info| seed >= info.metadata_nodes().end())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, repeat};

    use burgeon_block::{Error, ErrorKind};

    use super::{MAPPED, WireError, listen};

    #[test]
    fn the_answer_of_the_preparing_process_is_bounded() {
        let mut maps = 0;
        let failure = WireError::from(Error::new(ErrorKind::Corrupt, "damaged"));
        let said = format!("{MAPPED}\n{}\n", serde_json::to_string(&failure).unwrap());
        let heard = listen(said.as_bytes(), || maps += 1).unwrap().unwrap();
        assert_eq!((maps, Error::from(heard).kind()), (1, ErrorKind::Corrupt));
        assert!(listen(&b""[..], || ()).unwrap().is_none());
        // A line without an end, and lines without number.
        assert!(listen(repeat(b'x').take(1 << 20), || ()).is_err());
        assert!(listen(repeat(b'\n').take(1 << 20), || ()).is_err());
    }
}
