//! Archives as other programs write them, and files that are no archives.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::fs;

use burgeon_block::ErrorKind;

use common::{archives::*, *};

/// As gzip(1): `tar` to a tape and `dd` pad with zeros to whole blocks.
#[test]
fn zeros_after_the_end_of_a_gzip_stream_are_padding() {
    let (folder, store) = store();
    let (plain, expected) = one_file(folder.path(), &store);
    let (front, back) = plain.split_at(30_000);
    let packed = [pipe(front, "gzip"), pipe(back, "gzip")].concat();
    for padding in [1, 512, 3_000_000] {
        let padded = [packed.clone(), vec![0; padding]].concat();
        assert_eq!(from_tar(&store, padded).unwrap(), expected, "{padding}");
        let spoilt = [packed.clone(), vec![0; padding], vec![1]].concat();
        let error = from_tar(&store, spoilt).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{padding}: {error}");
    }
    assert!(from_tar(&store, [packed, vec![1; 20]].concat()).is_err());
}

#[test]
fn a_file_that_is_no_tar_archive_is_called_so() {
    let (folder, store) = store();
    let root = folder.path().join("tree");
    fs::create_dir(&root).unwrap();
    let tar = archive(&root, &[]);
    let text = b"#!/bin/sh\necho no archive\n".repeat(100);
    for (bytes, why) in [
        (vec![], "empty"),
        (b"short".to_vec(), "not a header"),
        (text.clone(), "not a header"),
        (pipe(&text, "gzip"), "not a header"),
        (b"BZh91AY".to_vec(), "bzip2 -dc FILE | burgeon build - NAME"),
        (b"PK\x03\x04rest".to_vec(), "zip file"),
    ] {
        let error = from_tar(&store, bytes).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("this is not a tar archive") && said.contains(why), "{said}");
        assert_eq!(error.kind(), ErrorKind::UnsupportedFormat, "{said}");
    }
    // A damaged header after the first one belongs to a tar archive.
    let mut damaged = ended(&[tar[..512].to_vec(), header(b"./a", b'0', 0, b"")]);
    damaged[600] ^= 1;
    let error = from_tar(&store, damaged).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("damaged"), "{error}");
}

/// As layers do: names below a symlink belong to the directory that it leads to, within the tree.
#[test]
fn symlinks_above_a_name_are_followed_within_the_tree() {
    let (_folder, store) = store();
    let file = |name: &[u8]| header(name, b'0', 0, b"");
    let manifest = from_tar(
        &store,
        ended(&[
            header(b"usr/lib/", b'5', 0, b""),
            header(b"lib", b'2', 0, b"usr/lib"),
            file(b"lib/libc.so"),
            header(b"lib/libm.so", b'1', 0, b"lib/libc.so"),
            header(b"out", b'2', 0, b"../../../etc"),
            file(b"out/passwd"),
            header(b"abs", b'2', 0, b"/var/data"),
            file(b"abs/file"),
        ]),
    )
    .unwrap();
    let names: Vec<_> = paths(&manifest.tree).into_keys().collect();
    let names: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name)).collect();
    assert_eq!(
        names,
        [
            "",
            "abs",
            "etc",
            "etc/passwd",
            "lib",
            "out",
            "usr",
            "usr/lib",
            "usr/lib/libc.so",
            "usr/lib/libm.so",
            "var",
            "var/data",
            "var/data/file"
        ]
    );
    assert_eq!(inode(&manifest, "lib").mode & 0o170_000, 0o120_000);
}
