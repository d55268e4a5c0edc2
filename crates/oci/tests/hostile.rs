//! Indexes that somebody has made wrong on purpose, and is believed: refused, or an image whose
//! data is in its layers; nothing else happens.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

use burgeon_block::ErrorKind;
use burgeon_image::{Limits, build::Options, catalog};
use burgeon_oci::{Found, Source, Want, Work, find_or_build, index, is_whole};
use burgeon_source::{Access, Directory, registry::Digest};
use serde_json::Value;
use testkit::{OciLayout, Rng};

/// Does `what` with what it takes to work.
fn with_work<T>(spool: &Path, what: impl FnOnce(&Work<'_>) -> T) -> T {
    let (access, options) = (Access::default(), Options::default());
    let (fetching, building) = (|_, _| (), |_: &_| ());
    what(&Work {
        access: &access,
        spool,
        own: None,
        options: &options,
        fetching: &fetching,
        building: &building,
    })
}

#[test]
fn no_index_does_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("tree/sub")).unwrap();
    fs::write(path("tree/large"), testkit::like_programs(1, 300_000)).unwrap();
    fs::write(path("tree/sub/small"), "small").unwrap();
    let tar = Command::new("tar").arg("-C").arg(path("tree")).args(["-c", "."]).output().unwrap();
    let layer = testkit::gzip(&tar.stdout, 6);
    let layout = path("layout");
    let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
    OciLayout::by_hand(&layout, None, &[(kind, layer)], |_| ()).unwrap();
    let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap().unwrap();
    let store = Directory::create(path("publisher")).unwrap();
    let made = with_work(folder.path(), |work| index(&store, &source, true, work)).unwrap();
    let blob = |digest: &str| layout.join("blobs/sha256").join(&digest[7..]);
    let put = |bytes: &[u8]| {
        let digest = Digest::of(bytes).to_string();
        fs::write(blob(&digest), bytes).unwrap();
        digest
    };
    let document = fs::read(blob(&made.digest)).unwrap();
    let sound: Value = serde_json::from_slice(&document).unwrap();
    let parts =
        [0, 1].map(|n| fs::read(blob(sound["layers"][n]["digest"].as_str().unwrap())).unwrap());
    let (mut refused, mut taken) = (0, 0);
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let document = match rng.below(3) {
            0 => rng.meddle(&document),
            n => {
                // A part, under the digest that it has now.
                let (mut all, n) = (sound.clone(), n as usize - 1);
                let part = rng.meddle(&parts[n]);
                all["layers"][n]["digest"] = put(&part).into();
                all["layers"][n]["size"] = part.len().into();
                all.to_string().into_bytes()
            }
        };
        let pinned = put(&document);
        let victim = Directory::create(path(&format!("victim-{seed}"))).unwrap();
        let found = with_work(folder.path(), |work| {
            find_or_build(&victim, &source, Want::Index(&pinned), work)
        });
        match found {
            Ok(Found::Image(found)) => {
                assert!(!is_whole(&victim, &found.name).unwrap(), "{seed}");
                let record = catalog::resolve(&victim, &found.name).unwrap();
                catalog::load(&victim, &record.digest().unwrap(), &Limits::default()).unwrap();
                taken += 1;
            }
            Ok(Found::Ours(name)) => panic!("{seed}: {name}"),
            Err(error) => {
                let expected = [
                    ErrorKind::Corrupt,
                    ErrorKind::Invalid,
                    ErrorKind::NotFound,
                    ErrorKind::UnsupportedFormat,
                ];
                assert!(expected.contains(&error.kind()), "{seed}: {error}");
                assert!(catalog::list(&victim).unwrap().is_empty(), "{seed}");
                refused += 1;
            }
        }
    }
    // Whitespace and annotations are nobody's concern.
    assert!(refused > 300 && taken > 0, "{refused} refused, {taken} taken");
}
