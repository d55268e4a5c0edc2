//! Tables of contents (TOC): images of eStargz and zstd:chunked are mounted before a layer was
//! read.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use rustix::fs::{XattrFlags, setxattr};
use serde_json::{Value, json};
use testkit::{
    Burgeon, Estargz, Fault, Link, OciLayout, Proxy, Registry, Rng, Space, Torture, TortureSize,
    compare, drop_caches, skopeo_copy,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const TOC_DIGEST: &str = "containerd.io/snapshot/stargz/toc.digest";

/// An archive of the files `names` in `tree`.
fn archive(tree: &Path, names: &[&str]) -> Vec<u8> {
    let mut tar = Command::new("tar");
    let output = tar.args(["--format=pax", "-c", "-C"]).arg(tree).args(names).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// An image of three layers: files of all kinds, some of which do not last. TOCs of eStargz have no
/// parts of a second, and who reads the archive for one here fails at line feeds in attributes: a
/// `simple` image has neither.
fn layered(folder: &Path, simple: bool) -> OciLayout {
    let layout = OciLayout::new(folder).unwrap();
    let stamp = |root: &Path| {
        if simple {
            let mut find = Command::new("find");
            find.current_dir(root).args([".", "-depth", "-exec", "touch", "-hd", "@1600000000"]);
            assert!(find.args(["{}", "+"]).status().unwrap().success());
        }
    };
    let first = |root: &Path| {
        Torture::make(&root.join("tree"), 33, TortureSize::Small).unwrap();
        Torture::forget_privileged_attributes(&root.join("tree")).unwrap();
        // No TOC has names or targets that are no UTF-8, and no layer holes or sockets.
        for name in ["names", "collisions", "sparse"] {
            fs::remove_dir_all(root.join("tree").join(name)).unwrap();
        }
        fs::remove_file(root.join("tree/special/socket")).unwrap();
        for link in fs::read_dir(root.join("tree/links")).unwrap().flatten() {
            if link.file_name().to_str().is_some_and(|name| name.starts_with("symlink-")) {
                fs::remove_file(link.path()).unwrap();
            }
        }
        fs::write(root.join("large"), Rng::new(1).bytes(12_000_000)).unwrap();
        let value = b"any\0byte\xff";
        setxattr(root.join("large"), "user.kind", value, XattrFlags::empty()).unwrap();
        if simple {
            fs::remove_dir_all(root.join("tree/attrs")).unwrap();
        }
        fs::write(root.join("gone"), Rng::new(2).bytes(700_000)).unwrap();
        fs::create_dir(root.join("folder")).unwrap();
        for n in 0..200 {
            fs::write(root.join(format!("folder/{n}")), Rng::new(n).bytes(97 * n as usize))
                .unwrap();
        }
        stamp(root);
    };
    layout.change(first).unwrap();
    let second = |root: &Path| {
        fs::remove_file(root.join("gone")).unwrap();
        fs::write(root.join("folder/7"), Rng::new(3).bytes(300_000)).unwrap();
        fs::write(root.join("zeros"), vec![0; 900_000]).unwrap();
        stamp(root);
    };
    layout.change(second).unwrap();
    let third = |root: &Path| {
        fs::hard_link(root.join("large"), root.join("again")).unwrap();
        stamp(root);
    };
    layout.change(third).unwrap();
    layout
}

/// The same image with layers that `skopeo` makes.
fn chunked(layout: &OciLayout, to: &Path) -> String {
    let from = format!("oci:{}:latest", layout.folder().display());
    let options = ["--dest-compress-format", "zstd:chunked"];
    skopeo_copy(&options, &from, &format!("oci:{}:latest", to.display())).unwrap();
    format!("oci-layout:{}", to.display())
}

fn manifest(layout: &Path) -> Value {
    let index: Value =
        serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap();
    serde_json::from_slice(&fs::read(blob(layout, digest)).unwrap()).unwrap()
}

fn blob(layout: &Path, digest: &str) -> PathBuf {
    layout.join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap())
}

/// The archives of an image, the lowest layer first.
fn archives(layout: &Path) -> Vec<Vec<u8>> {
    let unpack = |layer: &Value| {
        let path = blob(layout, layer["digest"].as_str().unwrap());
        Command::new("gzip")
            .arg("-dc")
            .stdin(fs::File::open(path).unwrap())
            .output()
            .unwrap()
            .stdout
    };
    manifest(layout)["layers"].as_array().unwrap().iter().map(unpack).collect()
}

/// An image of these layers.
fn estargz(layers: &[Estargz], to: &Path) -> String {
    let blobs: Vec<_> = layers.iter().map(|layer| (GZIP, layer.blob.clone())).collect();
    let annotate = |manifest: &mut Value| {
        for (layer, made) in manifest["layers"].as_array_mut().unwrap().iter_mut().zip(layers) {
            layer["annotations"] = json!({ TOC_DIGEST: made.digest });
        }
    };
    OciLayout::by_hand(to, None, &blobs, annotate).unwrap();
    format!("oci-layout:{}", to.display())
}

fn names(burgeon: &Burgeon) -> Vec<String> {
    let list: Value = serde_json::from_str(&burgeon.ok(&["list", "--json"])).unwrap();
    let images = list["images"].as_array().unwrap();
    images.iter().map(|image| image["name"].as_str().unwrap().to_owned()).collect()
}

/// The same image with layers of eStargz.
fn stargzed(layout: &OciLayout, to: &Path) -> String {
    let layers = archives(layout.folder());
    let made = layers.iter().map(|tar| Estargz::new(tar, 1 << 20, |_| ()).unwrap());
    estargz(&made.collect::<Vec<_>>(), to)
}

/// The tree that `umoci` unpacks from the eStargz image in `folder`, whose TOCs are files of it.
fn unpacked(space: &Space, folder: &Path) -> PathBuf {
    let layout = OciLayout::new(&space.path("plain")).unwrap();
    for tar in archives(folder) {
        let path = space.path("layer.tar");
        fs::write(&path, tar).unwrap();
        layout.add(&path).unwrap();
    }
    layout.unpack(&space.path("bundle")).unwrap()
}

/// An image with tables of contents: mounted, verified, made whole, and collected.
fn lives(space: &Space, source: &str, unpacked: &Path) {
    let burgeon = Burgeon::new(PROGRAM, space);
    let at = space.make_folder("at");
    let at = at.to_str().unwrap();
    let said = burgeon.ok(&["mount", source, at, "--read-only"]);
    assert!(said.contains("listed"), "{said}");
    compare(unpacked, at.as_ref()).unwrap().assert_same();
    burgeon.ok(&["umount", at]);
    // No layer came as a whole.
    assert!(!burgeon.state().join("store/layers").exists());
    let [listed] = &names(&burgeon)[..] else { panic!("{:?}", names(&burgeon)) };
    let whole = listed.strip_suffix("/contents").unwrap();
    burgeon.ok(&["verify", listed]);
    // An index goes before it, and writes that were made on it go on.
    let writes = ["--writes", "kept", "--write-limit", "256M"];
    let mounted = burgeon.mount(source, at.as_ref(), &writes);
    fs::write(mounted.path().join("written"), "kept").unwrap();
    fs::write(mounted.path().join("large"), "kept").unwrap();
    burgeon.umount(mounted);
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let made = publisher.ok(&["index", source, "--push", "--json"]);
    let made: Value = serde_json::from_str(&made).unwrap();
    let index = made["index"].as_str().unwrap();
    let mounted = burgeon.mount(source, at.as_ref(), &["--read-only", "--index", index]);
    let said = burgeon.ok(&["status"]);
    assert!(said.contains(&format!("{whole}/index")) && !said.contains(listed), "{said}");
    compare(unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    let mounted = burgeon.mount(source, at.as_ref(), &writes);
    for name in ["written", "large"] {
        assert_eq!(fs::read_to_string(mounted.path().join(name)).unwrap(), "kept");
    }
    let (is, was) = (mounted.path().join("folder/7"), unpacked.join("folder/7"));
    assert!(fs::read(is).unwrap() == fs::read(was).unwrap());
    burgeon.umount(mounted);
    burgeon.ok(&["writes", "rm", "kept"]);
    burgeon.ok(&["rm", &format!("{whole}/index")]);
    // All of it is another thing; what is there by then is found first.
    burgeon.ok(&["pull", "--eager", source]);
    assert!(names(&burgeon).iter().any(|name| name == whole), "{:?}", names(&burgeon));
    let mounted = burgeon.mount(source, at.as_ref(), &["--read-only"]);
    let said = burgeon.ok(&["status"]);
    assert!(!said.contains(listed) && said.contains(whole), "{said}");
    compare(unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    burgeon.ok(&["rm", listed]);
    burgeon.ok(&["rm", whole]);
    burgeon.ok(&["gc"]);
    assert_eq!(fs::read_dir(burgeon.state().join("store/derived")).unwrap().count(), 0);
}

#[test]
fn an_image_of_zstd_chunked_is_what_umoci_unpacks() {
    let space = Space::new("toc-zstd");
    let layout = layered(&space.path("layout"), false);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    lives(&space, &chunked(&layout, &space.path("chunked")), &unpacked);
}

#[test]
fn an_image_of_estargz_is_what_umoci_unpacks() {
    let space = Space::new("toc-gzip");
    let source = stargzed(&layered(&space.path("layout"), true), &space.path("estargz"));
    lives(&space, &source, &unpacked(&space, &space.path("estargz")));
}

#[test]
fn a_registry_is_asked_for_what_is_read_and_may_fail_in_between() {
    let space = Space::new("toc-registry");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space.path("layout"), false);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    chunked(&layout, &space.path("chunked"));
    let registry = Registry::start(&space.path("registry"), None).unwrap();
    let from = format!("oci:{}:latest", space.path("chunked").display());
    skopeo_copy(&[], &from, &format!("docker://{}/app:1", registry.address())).unwrap();
    let link = Link::new(registry.address(), Duration::ZERO, 1 << 30).unwrap();
    let source = format!("oci://{}/app:1", link.address());
    let mounted = burgeon.mount(&source, &space.path("at"), &[]);
    let came = link.bytes();
    assert!(came < 1_000_000, "{came} bytes came before anything was read");
    let small = mounted.path().join("folder/7");
    assert!(fs::read(&small).unwrap() == fs::read(unpacked.join("folder/7")).unwrap());
    assert!(link.bytes() - came < 3_000_000, "{} bytes came", link.bytes() - came);
    // Such a file is written to as any other.
    fs::File::options().write(true).open(&small).unwrap().write_all_at(b"changed", 5000).unwrap();
    let mut expected = fs::read(unpacked.join("folder/7")).unwrap();
    expected[5000..5007].copy_from_slice(b"changed");
    drop_caches();
    assert!(fs::read(&small).unwrap() == expected);
    burgeon.umount(mounted);
    // Connections break, bodies end early, ranges are lied about: nothing of that is seen.
    let proxy = Proxy::new(registry.address(), 5).unwrap();
    let other = Burgeon::with_state(PROGRAM, space.path("other"));
    let faults = [Fault::Reset, Fault::Truncate, Fault::Status(503), Fault::Status(429)];
    proxy.spoil(150, &faults);
    let source = format!("oci://{}/app:1", proxy.address());
    let mounted = other.mount(&source, &space.path("at"), &["--read-only"]);
    // Flipped bits are an error when they come twice in a row, and never seen.
    proxy.spoil(1000, &[Fault::FlipBit]);
    let error = fs::read(mounted.path().join("folder/7")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    proxy.spoil(100, &[Fault::Reset, Fault::Truncate, Fault::Status(503)]);
    assert!(proxy.settle());
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    other.umount(mounted);
    let name = names(&other).into_iter().find(|name| name.ends_with("/contents")).unwrap();
    // Data that has been read is here, although the registry is gone and no checksums were known.
    drop((proxy, link, registry));
    other.ok(&["shutdown"]);
    let mounted = other.mount(&name, &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    other.umount(mounted);
}

#[test]
fn a_rotten_block_of_the_cache_is_fetched_again() {
    let space = Space::new("toc-rot");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space.path("layout"), false);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let source = chunked(&layout, &space.path("chunked"));
    let read = || {
        let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
        compare(&unpacked, mounted.path()).unwrap().assert_same();
        let status: Value = serde_json::from_str(&burgeon.ok(&["status", "--json"])).unwrap();
        burgeon.umount(mounted);
        burgeon.ok(&["shutdown"]);
        status.to_string()
    };
    read();
    let images = fs::read_dir(burgeon.state().join("images")).unwrap().flatten();
    let images: Vec<_> = images.map(|image| image.path()).filter(|path| path.is_dir()).collect();
    let [image] = &images[..] else { panic!("{images:?}") };
    // A bit in many blocks, then in many of their checksums.
    let [arena] = &burgeon.arenas()[..] else { panic!("{:?}", burgeon.arenas()) };
    for (name, path, step) in
        [("cache", arena.clone(), 64 << 10), ("checksums", image.join("checksums"), 256)]
    {
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        for at in (100..file.metadata().unwrap().len()).step_by(step) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        }
        file.sync_all().unwrap();
        let status = read();
        // A checksum that does not match itself says nothing against the block: the chunk's seal in
        // the cache tells.
        for field in ["cache_corrupt_blocks", "fetches"] {
            let count = status.split(&format!("\"{field}\":")).nth(1).unwrap();
            assert_eq!(count.starts_with("0,"), name == "checksums", "{field}: {status}");
        }
    }
    // The same if they are gone as a whole.
    fs::remove_file(image.join("checksums")).unwrap();
    let status = read();
    assert!(status.contains("\"fetches\":0,"), "{status}");
    // If the layer is another one by then, the read fails and gives no other bytes.
    burgeon.lose_cache();
    for blob in fs::read_dir(space.path("chunked/blobs/sha256")).unwrap().flatten() {
        let len = blob.metadata().unwrap().len();
        let file = fs::File::options().write(true).open(blob.path()).unwrap();
        file.write_all_at(&vec![0; len as usize / 2], len / 4).unwrap();
    }
    let name = names(&burgeon).into_iter().find(|name| name.ends_with("/contents")).unwrap();
    let mounted = burgeon.mount(&name, &space.path("at"), &["--read-only"]);
    let error = fs::read(mounted.path().join("large")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    burgeon.umount(mounted);
}

#[test]
fn recorded_checksums_are_written_where_the_folder_of_images_was_made_anew() {
    let space = Space::new("toc-anew");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space.path("layout"), false);
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let source = chunked(&layout, &space.path("chunked"));
    let read = || {
        let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
        compare(&unpacked, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
        let images = fs::read_dir(burgeon.state().join("images")).unwrap().flatten();
        let checksums = images.filter(|image| image.path().join("checksums").is_file()).count();
        assert_eq!(checksums, 1);
        burgeon.status()["opener_pid"].clone()
    };
    let first = read();
    fs::remove_dir_all(burgeon.state().join("images")).unwrap();
    // The sandbox of the first opener names the folder that was removed.
    assert_ne!(read(), first);
}

#[test]
fn a_layer_without_a_toc_is_read_and_the_others_are_not() {
    let space = Space::new("toc-mixed");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let layout = layered(&space.path("layout"), false);
    chunked(&layout, &space.path("chunked"));
    let plain = space.path("above.tar");
    let above = space.make_folder("above");
    fs::write(above.join("above"), Rng::new(9).bytes(400_000)).unwrap();
    fs::write(above.join("small"), "in the manifest").unwrap();
    fs::write(&plain, archive(&above, &["above", "small"])).unwrap();
    layout.add(&plain).unwrap();
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let blobs = manifest(&space.path("chunked"))["layers"].as_array().unwrap().clone();
    let mut layers: Vec<_> = blobs
        .iter()
        .map(|layer| {
            let path = blob(&space.path("chunked"), layer["digest"].as_str().unwrap());
            (layer["mediaType"].as_str().unwrap(), fs::read(path).unwrap())
        })
        .collect();
    layers.push(("application/vnd.oci.image.layer.v1.tar", fs::read(&plain).unwrap()));
    let annotate = |made: &mut Value| {
        for (to, from) in made["layers"].as_array_mut().unwrap().iter_mut().zip(&blobs) {
            to["annotations"] = from["annotations"].clone();
        }
    };
    let mixed = space.path("mixed");
    OciLayout::by_hand(&mixed, None, &layers, annotate).unwrap();
    let source = format!("oci-layout:{}", mixed.display());
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    burgeon.umount(mounted);
    let stored = || fs::read_dir(burgeon.state().join("store/layers")).unwrap().count();
    assert_eq!(stored(), 1);
    burgeon.ok(&["gc"]);
    assert_eq!(stored(), 1);
    burgeon.ok(&["pull", "--eager", &source]);
    assert_eq!(stored(), 4);
}

#[test]
fn a_table_that_is_forged_or_impossible_is_not_used() {
    let space = Space::new("toc-forged");
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), Rng::new(1).bytes(300_000)).unwrap();
    fs::write(tree.join("other"), Rng::new(2).bytes(5000)).unwrap();
    let tar = archive(&tree, &["file", "other"]);
    let folder = space.path("layout");
    let mut number = 0;
    let mut mounts = |layer: Estargz, said: Option<&str>| {
        let _ = fs::remove_dir_all(&folder);
        let source = estargz(&[layer], &folder);
        number += 1;
        let burgeon = Burgeon::with_state(PROGRAM, space.path(&format!("state{number}")));
        let at = space.make_folder("at");
        let finished = burgeon.run(&["mount", &source, at.to_str().unwrap(), "--read-only"]);
        assert_eq!(finished.code, Some(0), "{}", finished.stderr);
        match said {
            Some(why) => assert!(finished.stderr.contains(why), "{why}: {}", finished.stderr),
            None => assert_eq!(finished.stderr, ""),
        }
        for name in ["file", "other"] {
            let (is, was) = (fs::read(at.join(name)).unwrap(), fs::read(tree.join(name)).unwrap());
            assert!(is == was, "{said:?}: {name}");
        }
        assert!(!at.join("forged").exists());
        burgeon.ok(&["umount", at.to_str().unwrap()]);
        burgeon.ok(&["shutdown"]);
    };
    mounts(Estargz::new(&tar, 100_000, |_| ()).unwrap(), None);
    // Of another TOC than the manifest's.
    let mut other = Estargz::new(&tar, 100_000, |_| ()).unwrap();
    other.digest = format!("sha256:{}", "0".repeat(64));
    mounts(other, Some("does not match the digest"));
    // The publisher vouches for these, but they cannot be.
    type Lie = fn(&mut Value);
    let lies: [(&str, Lie); 14] = [
        ("unknown version", |toc| toc["version"] = 2.into()),
        ("cannot be parsed", |toc| toc["entries"] = 5.into()),
        ("unknown type", |toc| toc["entries"][0]["type"] = "door".into()),
        ("belongs to no file", |toc| toc["entries"][0]["name"] = "forged".into()),
        ("not UTF-8", |toc| toc["entries"][0]["name"] = "\u{fffd}".into()),
        ("not a digest", |toc| toc["entries"][1]["chunkDigest"] = "md5:1".into()),
        ("32 MiB", |toc| toc["entries"][0]["offset"] = (1u64 << 40).into()),
        ("of \"file\", which has 300000", |toc| {
            toc["entries"][2]["chunkSize"] = (1u64 << 40).into()
        }),
        ("out of order", |toc| toc["entries"][1]["chunkOffset"] = 5.into()),
        ("lists 200000 bytes", |toc| drop(toc["entries"].as_array_mut().unwrap().remove(2))),
        ("is a hard link to", |toc| {
            let link = json!({ "name": "forged", "type": "hardlink", "linkName": "nowhere" });
            toc["entries"].as_array_mut().unwrap().push(link);
        }),
        ("a time", |toc| toc["entries"][0]["modtime"] = "yesterday".into()),
        ("attribute", |toc| toc["entries"][0]["xattrs"] = json!({ "user.a": "%" })),
        ("lists 300000 bytes", |toc| toc["entries"][0]["size"] = u64::MAX.into()),
    ];
    for (why, lie) in lies {
        mounts(Estargz::new(&tar, 100_000, lie).unwrap(), Some(why));
    }
    // A footer that leads nowhere, or no footer at all.
    for at in [12, 20, 33] {
        let mut cut = Estargz::new(&tar, 100_000, |_| ()).unwrap();
        let len = cut.blob.len();
        cut.blob[len - 51 + at] ^= 0x41;
        mounts(cut, Some("table of contents cannot be used"));
    }
}

#[test]
fn data_that_is_not_what_the_toc_says_is_an_error() {
    let space = Space::new("toc-lies");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    let bytes = Rng::new(1).bytes(1_000_000);
    fs::write(tree.join("file"), &bytes).unwrap();
    fs::write(tree.join("other"), "fine").unwrap();
    // The second of ten parts has another digest, as if the layer were another one there.
    let layer = Estargz::new(&archive(&tree, &["file", "other"]), 100_000, |toc| {
        toc["entries"][1]["chunkDigest"] = format!("sha256:{}", "0".repeat(64)).into();
    });
    let source = estargz(&[layer.unwrap()], &space.path("layout"));
    let mounted = burgeon.mount(&source, &space.path("at"), &["--read-only"]);
    assert_eq!(fs::read_to_string(mounted.path().join("other")).unwrap(), "fine");
    let file = fs::File::open(mounted.path().join("file")).unwrap();
    let mut failed = 0;
    for at in (0..bytes.len()).step_by(4096) {
        let mut block = vec![0; 4096.min(bytes.len() - at)];
        match file.read_exact_at(&mut block, at as u64) {
            Ok(()) => assert!(block == bytes[at..at + block.len()], "{at}"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{error}");
                failed += 1;
            }
        }
    }
    // The data that is unpacked together: some 512 KiB, and the chunks that reach into it.
    assert!((25..=200).contains(&failed), "{failed}");
    let said = burgeon.ok(&["status"]);
    assert!(said.contains("table of contents"), "{said}");
    drop(file);
    burgeon.umount(mounted);
    let [name] = &names(&burgeon)[..] else { panic!() };
    assert!(burgeon.run(&["verify", name]).stdout.contains("DAMAGED"));
}

#[test]
fn the_name_of_an_index_of_platforms_stands_for_the_most_that_is_known() {
    let space = Space::new("toc-platforms");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let tree = space.make_folder("tree");
    fs::write(tree.join("file"), Rng::new(1).bytes(300_000)).unwrap();
    let layer = Estargz::new(&archive(&tree, &["file"]), 1 << 20, |_| ()).unwrap();
    estargz(&[layer], &space.path("single"));
    let multi = space.path("multi");
    let index = fs::read(space.path("single/index.json")).unwrap();
    OciLayout::index_of(&space.path("single"), &multi, &serde_json::from_slice(&index).unwrap())
        .unwrap();
    let names = fs::read(multi.join("index.json")).unwrap();
    let names: Value = serde_json::from_slice(&names).unwrap();
    let pinned = names["manifests"][0]["digest"].as_str().unwrap();
    let by_name = format!("oci-layout:{}", multi.display());
    let by_digest = format!("{by_name}@{pinned}");
    let mount = |source: &str| {
        let mounted = burgeon.mount(source, &space.path("at"), &["--read-only"]);
        let is = fs::read(mounted.path().join("file")).unwrap();
        assert!(is == fs::read(tree.join("file")).unwrap());
        burgeon.umount(mounted);
    };
    let digest = |suffix: &str| {
        let list: Value = serde_json::from_str(&burgeon.ok(&["list", "--json"])).unwrap();
        let images = list["images"].as_array().unwrap();
        let mut found = images.iter().filter(|image| {
            let name = image["name"].as_str().unwrap();
            if suffix.is_empty() { name.starts_with(pinned) } else { name.ends_with(suffix) }
        });
        found.next().unwrap()["manifest"].clone()
    };
    mount(&by_digest);
    assert_eq!(digest(""), digest("/contents"));
    burgeon.ok(&["index", &by_name]);
    mount(&by_name);
    assert_eq!(digest(""), digest("/index"));
    mount(&by_digest);
    burgeon.ok(&["pull", "--eager", &by_digest]);
    assert_ne!(digest(""), digest("/contents"));
    mount(&by_digest);
}
