//! The mounts of a snapshot as containerd is to make them. Pure.
//!
//! | snapshot | mounts |
//! |---|---|
//! | active, no parent | a bind of its own folder, writable |
//! | active, native | a bind of its own mount, writable |
//! | view, no parent | the same, read-only |
//! | view, one parent | a bind of the parent's folder, read-only |
//! | view | overlay of the parents' folders |
//! | active | overlay of the parents' folders, its own above them |

use std::path::{Path, PathBuf};

use burgeon_block::{Error, ErrorKind, Result};

use crate::{
    api,
    model::{Labels, SnapshotKind},
};

/// containerd maps the ids of these mounts itself if the options say so, which it asks for by
/// labels.
const ID_MAPS: [(&str, &str); 2] = [
    ("uidmap", "containerd.io/snapshot/uidmapping"),
    ("gidmap", "containerd.io/snapshot/gidmapping"),
];

/// Options that every overlay gets, because this kernel's defaults may differ.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// The kernel knows `index`; off, because layers are shared by several overlays.
    pub(crate) has_index: bool,
}

impl Options {
    /// The options for the running kernel.
    pub(crate) fn of_kernel() -> Self {
        Self { has_index: Path::new("/sys/module/overlay/parameters/index").exists() }
    }
}

/// The mounts of a snapshot whose parents' folders are `lower`, the nearest first.
pub(crate) fn mounts(
    kind: SnapshotKind,
    labels: &Labels,
    own: &Path,
    mut lower: Vec<PathBuf>,
    options: Options,
) -> Vec<api::Mount> {
    let is_view = kind == SnapshotKind::View;
    if lower.is_empty() || is_view && lower.len() == 1 {
        let source = lower.pop().unwrap_or_else(|| own.join("fs"));
        let access = if is_view { "ro" } else { "rw" };
        return vec![bind(&source, access, labels)];
    }
    let mut all: Vec<String> = id_maps(labels).collect();
    if options.has_index {
        all.push("index=off".to_owned());
    }
    if !is_view {
        all.push(format!("workdir={}", own.join("work").display()));
        all.push(format!("upperdir={}", own.join("fs").display()));
    }
    let lower: Vec<_> = lower.iter().map(|path| path.to_string_lossy()).collect();
    all.push(format!("lowerdir={}", lower.join(":")));
    vec![api::Mount::new("overlay", "overlay", all)]
}

/// A bind of a folder, with mapped ids if the labels ask for them.
pub(crate) fn bind(source: &Path, access: &str, labels: &Labels) -> api::Mount {
    let options = [access.to_owned(), "rbind".to_owned()].into_iter().chain(id_maps(labels));
    api::Mount::new("bind", &source.to_string_lossy(), options.collect())
}

fn id_maps(labels: &Labels) -> impl Iterator<Item = String> + use<'_> {
    let maps = ID_MAPS.iter();
    maps.filter_map(|(option, label)| Some(format!("{option}={}", labels.get(*label)?)))
}

/// True if overlay's options can hold the path: they give these characters a meaning.
pub(crate) fn can_hold(path: &Path) -> bool {
    path.to_str().is_some_and(|path| !path.contains([':', ',', '\\', '"', '\n']))
}

/// The owner on this host of a root whose ids are mapped: uid and gid of the container's 0.
pub(crate) fn mapped_root(labels: &Labels) -> Result<Option<(u32, u32)>> {
    let of = |label: &str| labels.get(label).map(|map| first_id(label, map)).transpose();
    let [(_, uids), (_, gids)] = ID_MAPS;
    Ok(of(uids)?.zip(of(gids)?))
}

/// The id on this host of the container's id 0, in a list of `CONTAINER:HOST:COUNT`.
fn first_id(label: &str, map: &str) -> Result<u32> {
    let parts = |range: &str| -> Option<(u32, u32, u32)> {
        let mut parts = range.split(':').map(|part| part.parse().ok());
        let range = (parts.next()??, parts.next()??, parts.next()??);
        parts.next().is_none().then_some(range)
    };
    let mut ranges = map.split(',').map(parts);
    let first = ranges.find_map(|range| match range {
        Some((0, host, count)) if count > 0 => Some(host),
        _ => None,
    });
    let what = || format!("{label}={map} maps no id 0: it should be 0:HOST:COUNT");
    first.ok_or_else(|| Error::new(ErrorKind::Invalid, what()))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{Options, mapped_root, mounts};
    use crate::model::{Labels, SnapshotKind};

    fn shown(kind: SnapshotKind, labels: &Labels, lower: &[&str]) -> String {
        let lower = lower.iter().map(PathBuf::from).collect();
        let all = mounts(kind, labels, Path::new("/r/9"), lower, Options { has_index: true });
        let [mount] = all.as_slice() else { panic!("{all:?}") };
        format!("{} {} {}", mount.kind, mount.source, mount.options.join(" "))
    }

    #[test]
    fn each_kind_has_its_mounts() {
        let none = Labels::new();
        let cases = [
            (SnapshotKind::Active, &[][..], "bind /r/9/fs rw rbind"),
            (SnapshotKind::View, &[], "bind /r/9/fs ro rbind"),
            (SnapshotKind::View, &["/r/1/fs"], "bind /r/1/fs ro rbind"),
            (
                SnapshotKind::View,
                &["/r/2/fs", "/r/1/fs"],
                "overlay overlay index=off lowerdir=/r/2/fs:/r/1/fs",
            ),
            (
                SnapshotKind::Active,
                &["/r/1/fs"],
                "overlay overlay index=off workdir=/r/9/work upperdir=/r/9/fs lowerdir=/r/1/fs",
            ),
        ];
        for (kind, lower, expected) in cases {
            assert_eq!(shown(kind, &none, lower), expected);
        }
        let maps = [("uid", "0:100000:65536"), ("gid", "0:200000:65536")];
        let labels =
            maps.map(|(id, map)| (format!("containerd.io/snapshot/{id}mapping"), map.into()));
        assert_eq!(
            shown(SnapshotKind::Active, &labels.into(), &[]),
            "bind /r/9/fs rw rbind uidmap=0:100000:65536 gidmap=0:200000:65536"
        );
        assert_eq!(mapped_root(&none).unwrap(), None);
        let labels =
            maps.map(|(id, map)| (format!("containerd.io/snapshot/{id}mapping"), map.into()));
        assert_eq!(mapped_root(&labels.into()).unwrap(), Some((100_000, 200_000)));
        for wrong in ["", "1:100000:5", "0:x:1", "0:5:0", "0:1:2:3", "0:99999999999:1"] {
            let labels =
                maps.map(|(id, _)| (format!("containerd.io/snapshot/{id}mapping"), wrong.into()));
            assert!(mapped_root(&labels.into()).is_err(), "{wrong}");
        }
    }
}
