//! Indexes: OCI images that are read lazily, in their layers as they are.

#![allow(clippy::unwrap_used)]

mod layered;

use std::{fs, os::unix::fs::FileExt, path::Path};

use burgeon_image::{Manifest, ManifestLimits};
use burgeon_layer::Table;
use burgeon_source::derived_object;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use testkit::{Burgeon, OciLayout, Space, compare, skopeo_copy};

use self::layered::{layered, text};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

fn source(folder: &Path) -> String {
    format!("oci-layout:{}:latest", folder.display())
}

/// Makes the index of an image and pushes it as a referrer.
fn push(burgeon: &Burgeon, source: &str) -> Value {
    serde_json::from_str(&burgeon.ok(&["index", source, "--push", "--json"])).unwrap()
}

fn index_of(made: &Value) -> String {
    made["index"].as_str().unwrap().to_owned()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The blob of a layout with a digest.
fn blob(layout: &Path, digest: &str) -> std::path::PathBuf {
    layout.join("blobs/sha256").join(digest.strip_prefix("sha256:").unwrap())
}

/// A document of a layout.
fn document(layout: &Path, digest: &str) -> Value {
    serde_json::from_slice(&fs::read(blob(layout, digest)).unwrap()).unwrap()
}

/// The layers of an image of a layout, the lowest first.
fn layers(layout: &Path, image: &str) -> Vec<String> {
    let manifest = document(layout, image);
    let layers = manifest["layers"].as_array().unwrap().iter();
    layers.map(|layer| layer["digest"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn another_host_reads_an_indexed_image_lazily() {
    let space = Space::new("index");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let reader = Burgeon::with_state(PROGRAM, space.path("reader"));
    // gzip as umoci makes it, in one member; and uncompressed.
    let plain = space.path("plain");
    let from = format!("oci:{}:latest", layout.folder().display());
    skopeo_copy(&["--dest-decompress"], &from, &format!("dir:{}", space.path("dir").display()))
        .unwrap();
    let to = format!("oci:{}:latest", plain.display());
    skopeo_copy(&[], &format!("dir:{}", space.path("dir").display()), &to).unwrap();
    for folder in [layout.folder(), &plain] {
        let source = source(folder);
        let made = push(&publisher, &source);
        let (bytes, image_bytes) =
            (made["bytes"].as_u64().unwrap(), made["image_bytes"].as_u64().unwrap());
        assert!(bytes < image_bytes / 20, "{bytes} of {image_bytes}");
        // The same index again, and where a layout has one image that one is still meant.
        let without_tag = source.strip_suffix(":latest").unwrap();
        assert_eq!(push(&publisher, without_tag), made);
        let index = index_of(&made);
        let options = ["--read-only", "--index", &index];
        let mounted = reader.mount(&source, &space.path("at"), &options);
        compare(&unpacked, mounted.path()).unwrap().assert_same();
        reader.umount(mounted);
    }
    // Somewhere else now, and asked for without the index, which is known.
    let moved = space.path("moved");
    fs::rename(layout.folder(), &moved).unwrap();
    fs::remove_dir_all(space.path("reader/images")).unwrap();
    fs::create_dir(space.path("reader/images")).unwrap();
    let mounted = reader.mount(&source(&moved), &space.path("at"), &["--read-only"]);
    compare(&unpacked, mounted.path()).unwrap().assert_same();
    reader.umount(mounted);
    // The collector keeps the needed objects, and nothing else.
    reader.ok(&["gc"]);
    let name = |suffix: &str| {
        let list: Value = serde_json::from_str(&reader.ok(&["list", "--json"])).unwrap();
        let images = list["images"].as_array().unwrap().iter();
        let mut names = images.map(|image| image["name"].as_str().unwrap().to_owned());
        names.find(|name| name.ends_with(suffix))
    };
    let derived = || fs::read_dir(space.path("reader/store/derived")).unwrap().count();
    assert_eq!(derived(), 2);
    while let Some(name) = name("/index") {
        reader.ok(&["verify", &name].map(String::from));
        reader.ok(&["rm", &name].map(String::from));
    }
    reader.ok(&["gc"]);
    assert_eq!(derived(), 0);
}

#[test]
fn only_what_is_read_is_fetched_and_only_right_bytes_are_given() {
    let space = Space::new("index-part");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    let source = source(layout.folder());
    let made = push(&burgeon, &source);
    // A part in the middle of the large file, which the last layer has again for its second name,
    // is another one now: a fetch of the whole layer would notice.
    let mut layers = layers(layout.folder(), made["image"].as_str().unwrap());
    let last = blob(layout.folder(), &layers.pop().unwrap());
    let len = fs::metadata(&last).unwrap().len();
    let file = fs::File::options().write(true).open(&last).unwrap();
    file.write_all_at(&[0x55; 300_000], len / 2).unwrap();
    let other = Burgeon::with_state(PROGRAM, space.path("other"));
    other.fails(&["build", &source, "all"], 4, "does not match its digest");
    let mounted =
        other.mount(&source, &space.path("at"), &["--read-only", "--index", &index_of(&made)]);
    for name in ["last", "small/1/8"] {
        let (is, was) = (mounted.path().join(name), unpacked.join(name));
        assert!(fs::read(is).unwrap() == fs::read(was).unwrap(), "{name}");
    }
    let (is, was) = (
        fs::File::open(mounted.path().join("large")).unwrap(),
        fs::read(unpacked.join("large")).unwrap(),
    );
    let mut failed = 0;
    for at in (0..was.len()).step_by(256 << 10) {
        let mut bytes = vec![0; (256 << 10).min(was.len() - at)];
        match is.read_exact_at(&mut bytes, at as u64) {
            Ok(()) => assert!(bytes == was[at..at + bytes.len()], "{at}"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(5), "{error}");
                failed += 1;
            }
        }
    }
    // The damaged span, and the rest of the span after it.
    assert!((1..40).contains(&failed), "{failed}");
    drop(is);
    other.umount(mounted);
}

/// Writes a blob into a layout; gives its digest.
fn put(layout: &Path, bytes: &[u8]) -> (String, usize) {
    let digest = format!("sha256:{}", sha256(bytes));
    fs::write(blob(layout, &digest), bytes).unwrap();
    (digest, bytes.len())
}

#[test]
fn a_forged_index_is_not_used() {
    let space = Space::new("index-forged");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let evil = OciLayout::new(&space.path("evil")).unwrap();
    evil.change(|root| fs::write(root.join("large"), text(7, 5_000_000)).unwrap()).unwrap();
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let victim = Burgeon::with_state(PROGRAM, space.path("victim"));
    let at = source(layout.folder());
    let good = push(&publisher, &at);
    let bad = push(&publisher, &source(evil.folder()));
    let (image, good_index) = (good["image"].as_str().unwrap(), index_of(&good));
    // The other image's index and its parts lie beside this one, and say that they are of it.
    for entry in fs::read_dir(evil.folder().join("blobs/sha256")).unwrap().flatten() {
        let to = layout.folder().join("blobs/sha256").join(entry.file_name());
        fs::copy(entry.path(), to).unwrap();
    }
    let mut forged = document(layout.folder(), &index_of(&bad));
    forged["subject"] = document(layout.folder(), &good_index)["subject"].clone();
    let (forged, forged_len) = put(layout.folder(), forged.to_string().as_bytes());
    let tag = image.replace(':', "-");
    let list = json!({ "schemaVersion": 2, "manifests": [{
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": "application/vnd.burgeon.index.v1", "digest": forged, "size": forged_len,
    }] });
    let (list, list_len) = put(layout.folder(), list.to_string().as_bytes());
    let index_json = layout.folder().join("index.json");
    let mut names: Value = serde_json::from_slice(&fs::read(&index_json).unwrap()).unwrap();
    for one in names["manifests"].as_array_mut().unwrap() {
        if one["annotations"]["org.opencontainers.image.ref.name"] == tag {
            one["digest"] = json!(list);
            one["size"] = json!(list_len);
        }
    }
    fs::write(&index_json, names.to_string()).unwrap();
    let target = space.make_folder("at");
    let target = target.to_str().unwrap();
    // With its digest: it is of other layers. Of another image: refused. Not there: said.
    let fails = |index: &str, code, said: &str| {
        victim.fails(&["mount", &at, target, "--index", index], code, said);
    };
    fails(&forged, 4, "its table describes other layers");
    fails(&index_of(&bad), 4, "not of");
    fails(&format!("sha256:{}", "0".repeat(64)), 3, "cannot use the index");
    fails("sha256:12", 1, "is not a digest");
    // A part of the right one is another: its digest says so.
    let table =
        document(layout.folder(), &good_index)["layers"][1]["digest"].as_str().unwrap().to_owned();
    let path = blob(layout.folder(), &table);
    let sound = fs::read(&path).unwrap();
    let mut spoilt = sound.clone();
    spoilt[200] ^= 1;
    fs::write(&path, &spoilt).unwrap();
    fails(&good_index, 4, "does not match its digest");
    fs::write(&path, &sound).unwrap();
    // Nobody vouches for it: it is told of, and all is made of the layers.
    let output = victim.command(&["mount", &at, target, "--read-only"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains(&forged), "{said}");
    compare(&unpacked, Path::new(target)).unwrap().assert_same();
    victim.ok(&["umount", target]);
    victim.ok(&["shutdown"]);
}

#[test]
fn a_wrong_entry_of_a_believed_table_is_an_error_and_never_other_bytes() {
    let space = Space::new("index-liar");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let publisher = Burgeon::with_state(PROGRAM, space.path("publisher"));
    let victim = Burgeon::with_state(PROGRAM, space.path("victim"));
    let at = source(layout.folder());
    let good = index_of(&push(&publisher, &at));
    // The table reads everything 512 bytes further up; its digest matches its content.
    let mut index = document(layout.folder(), &good);
    let part = |n: usize| {
        let digest = index["layers"][n]["digest"].as_str().unwrap();
        fs::read(blob(layout.folder(), digest)).unwrap()
    };
    let mut table = Table::decode(&part(1)).unwrap();
    table.stretches.iter_mut().for_each(|stretch| stretch.offset -= 512);
    let table = table.encode().unwrap();
    let mut manifest = Manifest::decode(&part(0), &ManifestLimits::default()).unwrap();
    manifest.objects = vec![derived_object(&table).unwrap()];
    let (manifest, _) = manifest.encode(3).unwrap();
    for (n, bytes) in [manifest, table].iter().enumerate() {
        let (digest, len) = put(layout.folder(), bytes);
        index["layers"][n]["digest"] = json!(digest);
        index["layers"][n]["size"] = json!(len);
    }
    let (index, _) = put(layout.folder(), index.to_string().as_bytes());
    let mounted = victim.mount(&at, &space.path("at"), &["--read-only", "--index", &index]);
    for name in ["last", "large", "small/1/8"] {
        let error = fs::read(mounted.path().join(name)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5), "{name}: {error}");
    }
    let metadata = fs::metadata(mounted.path().join("large")).unwrap();
    assert_eq!(metadata.len(), fs::metadata(unpacked.join("large")).unwrap().len());
    victim.umount(mounted);
}

#[test]
fn an_index_is_no_image_to_push_and_all_of_its_image_can_be_pulled() {
    let space = Space::new("index-pull");
    let layout = layered(&space.path("layout"));
    let unpacked = layout.unpack(&space.path("bundle")).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    let source = source(layout.folder());
    let made = push(&burgeon, &source);
    let name = format!("{}/index", made["image"].as_str().unwrap());
    let fails = |arguments: &[&str]| {
        burgeon.fails(arguments, 1, "whose data is in that image's layers");
    };
    // Nothing is listening there: that it cannot be pushed is known before.
    fails(&["push", &name, "oci://127.0.0.1:9/app:1"]);
    fails(&["pull", "--eager", &name]);
    // Without --eager, a pull fetches only the data that a mount begins with.
    let said = burgeon.ok(&["pull", &source]);
    assert!(said.contains("its data comes when it is read"), "{said}");
    let said = burgeon.ok(&["pull", "--eager", &source, "--as", "whole"]);
    assert!(said.contains("whole is complete"), "{said}");
    // Nothing but this host is needed from now on, under either name.
    fs::remove_dir_all(layout.folder()).unwrap();
    for name in ["whole", made["image"].as_str().unwrap()] {
        let mounted = burgeon.mount(name, &space.path("at"), &["--read-only"]);
        compare(&unpacked, mounted.path()).unwrap().assert_same();
        burgeon.umount(mounted);
    }
}
