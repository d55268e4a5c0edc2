//! Tables of contents (TOC), compared with the layers that they list: each lie is found, and those
//! of real tools hold.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

use burgeon_image::builder::BuildOptions;
use burgeon_oci::{Documents, Pull, ReadLayers, Source, Tags, Unpacked, Work, unpack};
use burgeon_source::Access;
use rustix::fs::{XattrFlags, setxattr};
use serde_json::{Value, json};
use testkit::{Estargz, OciLayout, Rng, Torture, TortureSize, skopeo_copy};

const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const TOC_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";

/// Reads all layers of the layout, and returns the facts about them.
fn read(layout: &Path) -> Vec<Unpacked> {
    let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap().unwrap();
    let (access, options, read) =
        (Access::default(), BuildOptions::default(), ReadLayers::default());
    unpack(
        &source,
        &Work {
            access: &access,
            tags: Tags { folder: &layout.join("tags"), pull: Pull::Newer },
            documents: &Documents::new(layout.join("documents")),
            read: &read,
            spool: layout,
            own: None,
            content: None,
            allocate: &|_, _, _| true,
            options: &options,
            fetching: &|_, _| (),
            building: &|_| (),
        },
    )
    .unwrap();
    read.into_inner()
}

/// The archive of a folder with files of all kinds.
fn archive(folder: &Path) -> Vec<u8> {
    fs::create_dir(folder.join("dir")).unwrap();
    fs::write(folder.join("file"), Rng::new(1).bytes(250_000)).unwrap();
    fs::write(folder.join("other"), Rng::new(2).bytes(100_000)).unwrap();
    fs::write(folder.join("zeros"), vec![0; 300_000]).unwrap();
    setxattr(folder.join("other"), "user.kind", b"any\0byte", XattrFlags::empty()).unwrap();
    std::os::unix::fs::symlink("file", folder.join("symlink")).unwrap();
    fs::hard_link(folder.join("file"), folder.join("hard")).unwrap();
    let mut tar = Command::new("tar");
    tar.args(["--format=pax", "--xattrs", "--xattrs-include=user.*", "--mtime=@1600000000"]);
    let names = ["dir", "file", "other", "zeros", "symlink", "hard"];
    let output = tar.arg("-c").arg("-C").arg(folder).args(names).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn each_lie_of_a_table_is_found() {
    let space = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let folder = space.path().join("tree");
    fs::create_dir(&folder).unwrap();
    let tar = archive(&folder);
    type Lie = fn(&mut Value);
    fn at(toc: &mut Value, name: &str) -> usize {
        let mut names = toc["entries"].as_array().unwrap().iter().map(|entry| &entry["name"]);
        names.position(|it| it.as_str().unwrap().trim_end_matches('/') == name).unwrap()
    }
    fn set(toc: &mut Value, name: &str, key: &str, value: impl Into<Value>) {
        let index = at(toc, name);
        toc["entries"][index][key] = value.into();
    }
    let honest: [Lie; 5] = [
        |_| (),
        // Forms of the same.
        |toc| set(toc, "symlink", "name", "./symlink"),
        |toc| set(toc, "hard", "linkName", "/file"),
        |toc| set(toc, "hard", "mode", 0),
        // Parts of zeros need no data.
        |toc| {
            let start = at(toc, "zeros");
            for part in 0..3 {
                toc["entries"][start + part]["chunkType"] = "zeros".into();
            }
        },
    ];
    let lies: [(&str, Lie); 13] = [
        ("\"new\" is listed in the place of \"symlink\"", |toc| set(toc, "symlink", "name", "new")),
        ("another mode of \"dir\"", |toc| set(toc, "dir", "mode", 0o4755)),
        ("another owner of \"file\"", |toc| set(toc, "file", "uid", 7)),
        ("another time of \"file\"", |toc| set(toc, "file", "modtime", "2001-01-01T00:00:00Z")),
        ("another target of \"symlink\"", |toc| set(toc, "symlink", "linkName", "/etc/shadow")),
        ("another target of \"hard\"", |toc| set(toc, "hard", "linkName", "other")),
        ("another type of \"dir\"", |toc| set(toc, "dir", "type", "fifo")),
        ("other extended attributes of \"other\"", |toc| set(toc, "other", "xattrs", json!({}))),
        ("other extended attributes of \"dir\"", |toc| {
            set(toc, "dir", "xattrs", json!({ "security.capability": "AAAA" }));
        }),
        // The data of another file, which the layer has.
        ("the data of \"file\" is not", |toc| {
            let (file, other) = (at(toc, "file"), at(toc, "other"));
            for key in ["offset", "chunkDigest"] {
                toc["entries"][file][key] = toc["entries"][other][key].clone();
            }
        }),
        ("the data of \"file\" is not", |toc| set(toc, "file", "chunkType", "zeros")),
        ("\"symlink\" is listed in the place", |toc| {
            let index = at(toc, "zeros");
            toc["entries"].as_array_mut().unwrap().drain(index..index + 3);
        }),
        ("\"more\" is listed in the place", |toc| {
            let more = json!({ "name": "more", "type": "dir", "mode": 0o755 });
            toc["entries"].as_array_mut().unwrap().push(more);
        }),
    ];
    let lies = lies.into_iter().map(|(what, lie)| (Some(what), lie));
    for (number, (what, lie)) in honest.map(|lie| (None, lie)).into_iter().chain(lies).enumerate() {
        let made = Estargz::new(&tar, 100_000, lie).unwrap();
        let layout = space.path().join(number.to_string());
        OciLayout::by_hand(&layout, None, &[(GZIP, made.blob)], |manifest| {
            manifest["layers"][0]["annotations"] = json!({ TOC_DIGEST: made.digest });
        })
        .unwrap();
        let [layer] = &read(&layout)[..] else { panic!() };
        match (what, &layer.mislisted) {
            (None, None) => {}
            (Some(what), Some(found)) => assert!(found.contains(what), "{number}: {found}"),
            (what, found) => panic!("{number}: {what:?}, {found:?}"),
        }
    }
}

#[test]
fn tables_of_skopeo_hold() {
    let space = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plain = OciLayout::new(&space.path().join("plain")).unwrap();
    plain
        .change(|root| {
            let tree = root.join("tree");
            Torture::make(&tree, 33, TortureSize::Small).unwrap();
            // No TOC has names or targets that are no UTF-8, and no layer holes or sockets.
            for name in ["names", "collisions", "sparse", "special/socket"] {
                let path = tree.join(name);
                if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
                    .unwrap();
            }
            for link in fs::read_dir(tree.join("links")).unwrap().flatten() {
                if link.file_name().to_string_lossy().starts_with("symlink-") {
                    fs::remove_file(link.path()).unwrap();
                }
            }
            fs::write(root.join("zeros"), vec![0; 3_000_000]).unwrap();
        })
        .unwrap();
    plain.change(|root| fs::remove_file(root.join("zeros")).unwrap()).unwrap();
    let chunked = space.path().join("chunked");
    let [from, to] = [plain.folder(), &chunked].map(|it| format!("oci:{}:latest", it.display()));
    skopeo_copy(&["--dest-compress-format", "zstd:chunked"], &from, &to).unwrap();
    let layers = read(&chunked);
    assert_eq!(layers.len(), 2);
    assert!(layers.iter().all(|layer| layer.mislisted.is_none()), "{layers:?}");
}
