//! Damaged, incomplete and unusual OCI layouts: the error names the image and the file, says why,
//! and ends with the documented code.

#![allow(clippy::unwrap_used)]

use std::{fs, os::unix::fs::symlink, path::Path};

use serde_json::{Value, json};
use testkit::{Burgeon, OciLayout, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// A layout of one layer, an empty archive, whose manifest `spoil` changes.
fn layout(folder: &Path, spoil: impl FnOnce(&mut Value)) {
    OciLayout::by_hand(folder, None, &[(LAYER, vec![0; 10_240])], spoil).unwrap();
}

/// The file of the manifest of the only image.
fn manifest(folder: &Path) -> std::path::PathBuf {
    let index = fs::read(folder.join("index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap().to_owned();
    folder.join("blobs/sha256").join(&digest["sha256:".len()..])
}

#[test]
fn a_layout_that_cannot_be_used_is_named_with_its_reason() {
    let space = Space::new("layouts");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let fails = |name: &str, code: i32, why: &str| {
        let image = format!("oci-layout:{}", space.path(name).display());
        for line in [&["build", &*image, "x"][..], &["index", &image]] {
            burgeon.fails(line, code, &image);
            burgeon.fails(line, code, why);
        }
    };
    layout(&space.path("good"), |_| ());
    burgeon.ok(&["build", &format!("oci-layout:{}", space.path("good").display()), "x"]);
    for (name, index, code, why) in [
        ("no-json", "{nope", 4, "index.json: "),
        ("no-index", r#"{"schemaVersion":2}"#, 4, "index.json: "),
        ("version", r#"{"schemaVersion":1,"manifests":[]}"#, 4, "index.json: "),
    ] {
        layout(&space.path(name), |_| ());
        fs::write(space.path(name).join("index.json"), index).unwrap();
        fails(name, code, why);
    }
    for (name, digest, why) in [
        ("digest", "sha256:zz".to_owned(), "manifest is invalid: "),
        ("md5", "md5:0123".to_owned(), "has \"md5:0123\" for a digest"),
        ("sha512", format!("sha512:{}", "0".repeat(128)), "with digests of SHA-256"),
    ] {
        layout(&space.path(name), |manifest| manifest["layers"][0]["digest"] = json!(digest));
        fails(name, 4, why);
    }
    layout(&space.path("helm"), |manifest| manifest["config"]["mediaType"] = json!("x/helm"));
    fails("helm", 4, "not a container image, but an artifact of type \"x/helm\"");
    layout(&space.path("large"), |manifest| manifest["fill"] = json!("x".repeat(5 << 20)));
    fails("large", 4, "is larger than 4 MiB");
    layout(&space.path("longer"), |manifest| manifest["layers"][0]["size"] = json!(9_000));
    fails("longer", 4, "is longer than the 9000 bytes");
    layout(&space.path("incomplete"), |_| ());
    fs::remove_file(manifest(&space.path("incomplete"))).unwrap();
    fails("incomplete", 3, "the layout is not complete");
    layout(&space.path("changed"), |_| ());
    let changed = manifest(&space.path("changed"));
    fs::write(&changed, fs::read(&changed).unwrap().repeat(2)).unwrap();
    fails("changed", 4, "does not match its digest");
}

#[test]
fn a_layout_of_symlinks_is_answered_by_how_to_copy_it() {
    let space = Space::new("linked-layouts");
    let burgeon = Burgeon::new(PROGRAM, &space);
    let (of_files, of_folders) = (space.path("files"), space.path("folders"));
    layout(&of_files, |_| ());
    let blob = manifest(&of_files);
    fs::rename(&blob, space.path("blob")).unwrap();
    symlink(space.path("blob"), &blob).unwrap();
    layout(&of_folders, |_| ());
    fs::rename(of_folders.join("blobs"), space.path("blobs")).unwrap();
    symlink(space.path("blobs"), of_folders.join("blobs")).unwrap();
    for (folder, link) in [(&of_files, &blob), (&of_folders, &of_folders.join("blobs"))] {
        let image = format!("oci-layout:{}", folder.display());
        let said = burgeon.run(&["build", &*image, "x"]);
        // A kernel without Landlock lets the reader follow it.
        if said.code == Some(0) {
            continue;
        }
        let why = format!("{} is a symlink to a place outside of the layout", link.display());
        let remedy = format!("cp -rL {} COPY", folder.display());
        assert!(said.stderr.contains(&why) && said.stderr.contains(&remedy), "{said:#?}");
    }
}
