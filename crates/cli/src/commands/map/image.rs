//! Maps an image of the store, or a file or folder in it. The manifest gives the tree; all data of
//! the image is one extent, from which each file is cloned.
//!
//! If a file's size is not a multiple of 4 KiB, the kernel reads its last block when the file is
//! cut there. No local file has these bytes, so they are fetched.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::File,
    ops::Range,
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::{Path, PathBuf},
};

use anyhow::Result;
use burgeon_block::{Digest, Error, ErrorKind};
use burgeon_daemon::{honoured, protocol::MapContent};
use burgeon_image::{DATA_START, InodeBody, Manifest, ManifestLimits, catalog};
use rustix::fs::{FileType, makedev};

use super::{
    Addresses, Mapped, Mount, Target, clone,
    disarm::{Disarm, Disarmed},
    name_it, no_file,
    tree::{self, Kind, Origin, TreeEntry, Xattrs, cannot_make, check_count},
    unnamed,
};
use crate::commands::{Context, named};

/// Threads that make files. They mostly wait for last blocks, of which the daemon fetches 32
/// chunks at once.
const THREADS: usize = 16;

/// An image, and a path in it.
pub(super) struct Named {
    digest: Digest,
    manifest: Manifest,
    path: PathBuf,
    /// The user's input.
    shown: String,
}

impl Named {
    /// Parses `IMAGE` or `IMAGE:PATH`. Names may contain colons, too: the longest existing name
    /// counts.
    pub(super) fn find(context: &Context, text: &Path) -> Result<Self> {
        let store = context.open_store()?;
        let shown = text.to_string_lossy().into_owned();
        let colons = shown.rmatch_indices(':').map(|(at, _)| at);
        let mut none = None;
        for end in std::iter::once(shown.len()).chain(colons) {
            match named::trusted(context, &store, &shown[..end]) {
                Ok(record) => {
                    let path = shown[end..].trim_start_matches(':').trim_matches('/').into();
                    let digest = record.digest()?;
                    let manifest = catalog::load(&store, &digest, &ManifestLimits::default())?;
                    return Ok(Self { digest, manifest, path, shown });
                }
                // No such image, or not a valid name.
                Err(e) => match e.downcast::<Error>() {
                    Ok(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
                        none.get_or_insert(e);
                    }
                    Ok(e) => return Err(e.into()),
                    Err(e) => return Err(e),
                },
            }
        }
        let what = format!(
            "cannot map {shown}: it is neither a path of this host nor an image \
            of the store; `burgeon list` lists images"
        );
        Err(match none {
            Some(why) => Error::with_source(ErrorKind::NotFound, what, why),
            None => Error::new(ErrorKind::NotFound, what),
        }
        .into())
    }

    /// The inode at the path, without following symlinks.
    fn inode(&self, children: &Children) -> Result<u32> {
        let tree = &self.manifest.tree;
        let mut at = 0;
        for part in self.path.components() {
            let name = part.as_os_str().as_bytes();
            let found =
                children.of(at).find(|dirent| tree.bytes(tree.dirents[*dirent].name) == name);
            let Some(dirent) = found else {
                let message = format!("cannot map {}: the image has no such path", self.shown);
                return Err(Error::new(ErrorKind::NotFound, message).into());
            };
            at = tree.dirents[dirent].inode;
        }
        Ok(at)
    }
}

/// The names in each folder, as ranges: those of one folder are adjacent.
struct Children(HashMap<u32, Range<usize>>);

impl Children {
    fn new(manifest: &Manifest) -> Self {
        let (mut children, mut next) = (HashMap::new(), 0);
        for group in manifest.tree.dirents.chunk_by(|a, b| a.parent == b.parent) {
            children.insert(group[0].parent, next..next + group.len());
            next += group.len();
        }
        Self(children)
    }

    /// Indices of names.
    fn of(&self, inode: u32) -> Range<usize> {
        self.0.get(&inode).cloned().unwrap_or_default()
    }
}

/// An image whose data has been mapped.
struct Image {
    manifest: Manifest,
    /// The area's file, and the start of the image's data in it; `None` if the image has no data.
    data: Option<(File, u64)>,
}

/// Makes `named` appear at `target`; also returns notes for the user.
pub(super) fn map(
    context: &Context,
    mount: &Mount,
    target: &Target,
    named: Named,
) -> Result<(Mapped, Vec<String>)> {
    let children = Children::new(&named.manifest);
    let root = named.inode(&children)?;
    let Named { digest, manifest, shown, .. } = named;
    let mut entries = entries(&manifest, &children, root, &shown)?;
    let disarm = Disarm::new(honoured(&context.state, &digest), mount.honours);
    let disarmed = disarm.apply(&mut entries);
    let [first, ..] = entries.as_slice() else { unreachable!("the root is one") };
    let is_folder = match first.kind {
        Kind::Folder => true,
        Kind::File(_) => false,
        _ => return Err(no_file(shown)),
    };
    let len = manifest.data_range().len();
    let (mut data, mut notes) = (None, Vec::new());
    if len > 0 {
        let (store, store_identity) = (context.store.clone(), context.store_identity());
        let content = MapContent::Image { digest: digest.into(), store, store_identity, len };
        let origin = format!("image {shown} ({digest})");
        let given: Addresses = mount.map(&target.path, &origin, vec![content], None)?;
        notes = given.notes;
        data = Some((given.area, given.start));
    }
    notes.extend(disarmed);
    let image = Image { manifest, data };
    let origin = Disarmed(&image, disarm);
    if is_folder {
        return Ok((tree::make(target, &entries, &origin)?, notes));
    }
    let file = unnamed(target, true)?;
    image.fill(first, &file)?;
    tree::dress(&file, first, &origin, &target.path)?;
    name_it(&file, target)?;
    Ok((Mapped { files: 1, bytes: image.inode(first).size }, notes))
}

/// The entry `root` and everything below it, folders before their contents.
fn entries(
    manifest: &Manifest,
    children: &Children,
    root: u32,
    shown: &str,
) -> Result<Vec<TreeEntry>> {
    let tree = &manifest.tree;
    let (mut entries, mut folders) = (Vec::new(), Vec::new());
    let mut first_names = HashMap::new();
    let mut found = |path: PathBuf, number: u32, folders: &mut Vec<(PathBuf, u32)>| -> Result<()> {
        check_count(&entries, shown)?;
        let inode = &tree.inodes[number as usize];
        let index = entries.len();
        let first = *first_names.entry(number).or_insert(index);
        let kind = match FileType::from_raw_mode(inode.mode) {
            _ if first != index => Kind::Link(first),
            FileType::Directory => {
                folders.push((path.clone(), number));
                Kind::Folder
            }
            FileType::RegularFile => Kind::File(inode.size),
            FileType::Symlink => match inode.body {
                InodeBody::Inline(target) => {
                    Kind::Symlink(OsStr::from_bytes(tree.bytes(target)).into())
                }
                _ => unreachable!("a manifest that was decoded has symlinks with targets"),
            },
            _ => Kind::Node(makedev((inode.rdev >> 20) as u32, (inode.rdev & 0xf_ffff) as u32)),
        };
        entries.push(TreeEntry {
            path,
            kind,
            mode: inode.mode,
            owner: (inode.uid, inode.gid),
            modified: (inode.mtime_s, inode.mtime_ns),
            key: number.into(),
        });
        Ok(())
    };
    found(PathBuf::new(), root, &mut folders)?;
    while let Some((path, folder)) = folders.pop() {
        for dirent in &tree.dirents[children.of(folder)] {
            let path = path.join(OsStr::from_bytes(tree.bytes(dirent.name)));
            found(path, dirent.inode, &mut folders)?;
        }
    }
    Ok(entries)
}

impl Image {
    fn inode(&self, entry: &TreeEntry) -> &burgeon_image::Inode {
        &self.manifest.tree.inodes[entry.key as usize]
    }
}

impl Origin for Image {
    fn threads(&self) -> usize {
        THREADS
    }

    fn fill(&self, entry: &TreeEntry, file: &File) -> Result<()> {
        let (tree, inode) = (&self.manifest.tree, self.inode(entry));
        let mut end = 0;
        if let InodeBody::Inline(bytes) = inode.body {
            file.write_all_at(tree.bytes(bytes), 0).map_err(cannot_make(&entry.path))?;
            end = inode.size;
        }
        for extent in tree.extents_of(inode) {
            let Some((area, start)) = &self.data else { unreachable!("extents are data") };
            let start = start + (extent.address - DATA_START);
            clone(area, start, file, extent.file_offset, extent.len)?;
            end = extent.file_offset + extent.len;
        }
        if end != inode.size {
            // The file ends in a hole or within the last block.
            file.set_len(inode.size).map_err(cannot_make(&entry.path))?;
        }
        Ok(())
    }

    fn xattrs(&self, entry: &TreeEntry) -> Result<Xattrs> {
        let tree = &self.manifest.tree;
        let xattrs = tree.xattrs_of(self.inode(entry)).iter();
        Ok(xattrs.map(|x| (tree.bytes(x.name).into(), tree.bytes(x.value).into())).collect())
    }
}
