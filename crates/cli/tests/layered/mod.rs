//! An OCI image to be indexed.

#![allow(clippy::unwrap_used, unreachable_pub)]

use std::{fs, os::unix::fs::symlink, path::Path};

use testkit::{OciLayout, Rng};

/// Bytes that compress to a half.
pub fn text(seed: u64, len: usize) -> Vec<u8> {
    Rng::new(seed).bytes(len).iter().map(|byte| b'a' + (byte & 15)).collect()
}

/// An image of three layers: small and large files, some of which do not last.
pub fn layered(folder: &Path) -> OciLayout {
    let layout = OciLayout::new(folder).unwrap();
    let first = |root: &Path| {
        for n in 0..300 {
            fs::create_dir_all(root.join(format!("small/{}", n % 7))).unwrap();
            let len = 100 + 97 * n as usize;
            fs::write(root.join(format!("small/{}/{n}", n % 7)), text(n, len)).unwrap();
        }
        fs::write(root.join("large"), text(1000, 12_000_000)).unwrap();
        fs::write(root.join("gone"), text(1001, 3_000_000)).unwrap();
        symlink("large", root.join("link")).unwrap();
    };
    layout.change(first).unwrap();
    let second = |root: &Path| {
        fs::remove_file(root.join("gone")).unwrap();
        fs::remove_dir_all(root.join("small/3")).unwrap();
        fs::write(root.join("small/1/8"), text(1002, 40_000)).unwrap();
        fs::write(root.join("last"), text(1003, 2_000_000)).unwrap();
    };
    layout.change(second).unwrap();
    layout.change(|root| fs::hard_link(root.join("large"), root.join("again")).unwrap()).unwrap();
    layout
}
