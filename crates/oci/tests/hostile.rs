//! Hostile input that the user or the image's manifest trusts by digest: it is refused, or gives
//! an image that reads its data from its layers, and takes a bounded amount of memory.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    io::{Read, Write},
    path::Path,
    process::Command,
};

use burgeon_block::{BlockSource, ErrorKind};
use burgeon_image::{ManifestLimits, builder::BuildOptions, catalog};
use burgeon_oci::{
    Documents, Found, How, ImageForm, Pull, ReadLayers, Source, Tags, Work, find_or_build, index,
    is_whole,
};
use burgeon_source::{Access, Directory, Objects, References, Store, registry::OciDigest, waiting};
use serde_json::{Value, json};
use testkit::{Estargz, OciLayout, Rng};

/// Calls `what` with a default environment.
fn with_work<T>(spool: &Path, what: impl FnOnce(&Work<'_>) -> T) -> T {
    with_own(spool, None, what)
}

/// Like `with_work`, with a store of the host's own.
fn with_own<T>(spool: &Path, own: Option<&Directory>, what: impl FnOnce(&Work<'_>) -> T) -> T {
    let (access, options) = (Access::default(), BuildOptions::default());
    let (fetching, building) = (|_, _| (), |_: &_| ());
    let tags = Tags { folder: &spool.join("tags"), pull: Pull::Newer };
    let documents = Documents::new(spool.join("documents"));
    what(&Work {
        access: &access,
        tags,
        documents: &documents,
        read: &ReadLayers::default(),
        spool,
        own,
        content: None,
        allocate: &|_, _, _| true,
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
        let digest = OciDigest::of(bytes).to_string();
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
                // A changed part, under its new digest.
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
            find_or_build(&victim, &source, ImageForm::Index(&pinned), work)
        });
        match found {
            Ok(Found::Image(found)) => {
                assert!(!is_whole(&victim, &found.image).unwrap(), "{seed}");
                let digest = found.image.digest().unwrap();
                catalog::load(&victim, &digest, &ManifestLimits::default()).unwrap();
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
    // Changes of whitespace and annotations are accepted.
    assert!(refused > 300 && taken > 0, "{refused} refused, {taken} taken");
}

/// A random value, valid in some place of a table of contents or in none.
fn any_value(rng: &mut Rng) -> Value {
    let texts = [
        "",
        "a",
        "../a",
        "/a",
        "a/b",
        ".wh.large",
        ".wh..wh..opq",
        "zeros",
        "2001-01-01T00:00:00Z",
    ];
    let kinds = ["reg", "chunk", "dir", "symlink", "hardlink", "char", "block", "fifo", "door"];
    match rng.below(5) {
        0 => rng.pick(&texts).to_string().into(),
        1 => rng.pick(&kinds).to_string().into(),
        2 => (1u64 << rng.below(64)).into(),
        3 => rng.below(2000).into(),
        _ => rng.pick(&[Value::Null, json!([]), json!(-1), json!({}), json!(1.5)]).clone(),
    }
}

/// Random tables of contents with the right digest are used or not, or the image is refused;
/// nothing else happens. (For wrong statements about the data, see `--test toc`.)
#[test]
fn no_toc_does_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("tree/sub")).unwrap();
    fs::write(path("tree/large"), testkit::like_programs(1, 300_000)).unwrap();
    fs::write(path("tree/sub/small"), "small").unwrap();
    std::os::unix::fs::symlink("large", path("tree/link")).unwrap();
    let tar = Command::new("tar").arg("-C").arg(path("tree")).args(["-c", "."]).output().unwrap();
    let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
    let (mut listed, mut read, mut refused) = (0, 0, 0);
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let layer = Estargz::new(&tar.stdout, 100_000, |toc| {
            for _ in 0..rng.below(4) {
                let entries = toc["entries"].as_array_mut().unwrap();
                let number = rng.below(entries.len() as u64) as usize;
                let entry = entries[number].as_object_mut().unwrap();
                let mut keys: Vec<String> = entry.keys().cloned().collect();
                keys.extend(["innerOffset", "endOffset", "chunkType", "xattrs"].map(String::from));
                entry.insert(rng.pick(&keys).clone(), any_value(&mut rng));
                if rng.below(8) == 0 {
                    let twin = entries[number].clone();
                    entries.insert(rng.below(entries.len() as u64) as usize, twin);
                }
            }
        });
        let layer = layer.unwrap();
        let layout = path(&format!("layout-{seed}"));
        let annotate = |manifest: &mut Value| {
            let pin = json!({ "containerd.io/snapshot/stargz/toc.digest": layer.digest });
            manifest["layers"][0]["annotations"] = pin;
        };
        OciLayout::by_hand(&layout, None, &[(kind, layer.blob)], annotate).unwrap();
        let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap().unwrap();
        let own = Directory::create(path(&format!("own-{seed}"))).unwrap();
        let found = with_own(folder.path(), Some(&own), |work| {
            find_or_build(&own, &source, ImageForm::Any, work)
        });
        match found {
            Ok(Found::Image(found)) => {
                let digest = found.image.digest().unwrap();
                match found.how {
                    How::Listed => listed += 1,
                    How::Fetched | How::Built => {
                        assert!(!found.notes.is_empty(), "{seed}");
                        read += 1;
                    }
                }
                let objects = Objects::new(Store::Directory(own.clone()), References::Allow);
                let read = |object: &_, range| waiting(objects.read(object, range));
                let verified = catalog::verify(&own, &digest, &read, &|_, _| ()).unwrap();
                assert!(found.how == How::Listed || verified.damage.is_empty(), "{seed}");
            }
            Ok(Found::Ours(name)) => panic!("{seed}: {name}"),
            Err(error) => {
                assert!(
                    matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Invalid),
                    "{seed}: {error}"
                );
                refused += 1;
            }
        }
        fs::remove_dir_all(&layout).unwrap();
    }
    assert!(listed > 100 && read > 100 && refused < 20, "{listed}, {read}, {refused}");
}

/// A layer of `tar` with a zstd:chunked TOC, and its annotations for the image's manifest.
fn chunked(toc: &str, tar: &[u8]) -> (Vec<u8>, Value) {
    let stored = zstd::bulk::compress(toc.as_bytes(), 3).unwrap();
    // A skippable frame: magic number and length.
    let mut layer = 0x184d_2a50u32.to_le_bytes().to_vec();
    layer.extend((stored.len() as u32).to_le_bytes());
    layer.extend(&stored);
    layer.extend(zstd::bulk::compress(tar, 3).unwrap());
    let position = format!("8:{}:{}:1", stored.len(), toc.len());
    let pin = json!({
        "io.github.containers.zstd-chunked.manifest-checksum": OciDigest::of(&stored).to_string(),
        "io.github.containers.zstd-chunked.manifest-position": position,
    });
    (layer, pin)
}

/// Small TOCs and layers that unpack to huge ones are refused with the reason, below 256 MiB.
#[test]
fn no_toc_or_layer_takes_much_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The measured process must not build the input, so the TOCs are made by functions.
    type MakeToc = fn() -> String;
    let blanks: MakeToc = || format!(r#"{{"version":1,"entries":[]{}}}"#, " ".repeat(120 << 20));
    let attributes: MakeToc = || {
        let all = r#""a":"","#.repeat(5 << 20);
        format!(
            r#"{{"version":1,"entries":[{{"type":"dir","name":"a","xattrs":{{{all}"b":""}}}}]}}"#
        )
    };
    let entries: MakeToc = || {
        let entry = r#"{"type":"dir","name":"NAME","mode":493}"#;
        let all = format!("{entry},").repeat(1_000_000);
        format!(r#"{{"version":1,"entries":[{all}{entry}]}}"#)
    };
    let tocs: [(&str, MakeToc, &str); 4] = [
        ("blanks", blanks, "MiB"),
        ("attributes", attributes, "10000 attributes"),
        ("entries", entries, "MiB"),
        ("a layer", String::new, "MiB"),
    ];
    for (name, toc, said) in tocs {
        let layout = folder.path().join(name);
        let input = || {
            let kind = "application/vnd.oci.image.layer.v1.tar+zstd";
            let toc = toc();
            let mut header = vec![0; 512];
            header[..8].copy_from_slice(b"folder/0");
            header[124] = b'0';
            header[156] = b'5';
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..155].copy_from_slice(format!("{:06o}\0", sum + 8 * 32).as_bytes());
            let tar = match toc.is_empty() {
                true => header.repeat(1 << 20),
                false => [header, vec![0; 1024]].concat(),
            };
            let (layer, pin) = chunked(&toc, &tar);
            assert!(layer.len() < 100 << 10, "{name}: {}", layer.len());
            let annotate = |manifest: &mut Value| {
                if !toc.is_empty() {
                    manifest["layers"][0]["annotations"] = pin;
                }
            };
            OciLayout::by_hand(&layout, None, &[(kind, layer)], annotate).unwrap();
            layout.clone()
        };
        let test = "no_toc_or_layer_takes_much_memory";
        let measured = testkit::measure(test, name, input, |layout| {
            let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap();
            let own = Directory::create(layout.join("own")).unwrap();
            let found = with_own(layout, Some(&own), |work| {
                find_or_build(&own, &source.unwrap(), ImageForm::Any, work)
            });
            match found {
                Ok(Found::Image(found)) => format!("{:?} {:?}", found.how, found.notes),
                Ok(Found::Ours(name)) => format!("{name}"),
                Err(error) => error.to_string(),
            }
        });
        let Some(measured) = measured else { continue };
        println!("{name}: {measured:?}");
        assert!(measured.said.contains(said), "{name}: {measured:?}");
        assert!(measured.peak_bytes < 256 << 20, "{name}: {measured:?}");
    }
}

/// Four layers fetched in parallel, each of which fills a window of 128 MiB.
#[test]
fn wide_windows_are_not_filled_at_a_time() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layout = folder.path().join("layout");
    let input = || {
        let kind = "application/vnd.oci.image.layer.v1.tar+zstd";
        let layers = [0u8, 1, 2, 3].map(|number| {
            let len: u64 = 130 << 20;
            let mut header = vec![0; 512];
            header[..2].copy_from_slice(&[b'f', b'0' + number]);
            header[124..135].copy_from_slice(format!("{len:011o}").as_bytes());
            header[156] = b'0';
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..155].copy_from_slice(format!("{:06o}\0", sum + 8 * 32).as_bytes());
            let mut zstd = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
            zstd.window_log(27).unwrap();
            zstd.write_all(&header).unwrap();
            // All of the data refers to the window.
            let end = std::io::repeat(0).take(1024);
            let mut rest = std::io::repeat(b'x').take(len).chain(end);
            std::io::copy(&mut rest, &mut zstd).unwrap();
            (kind, zstd.finish().unwrap())
        });
        OciLayout::by_hand(&layout, None, &layers, |_| ()).unwrap();
        layout.clone()
    };
    let test = "wide_windows_are_not_filled_at_a_time";
    let measured = testkit::measure(test, "windows", input, |layout| {
        let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap();
        let own = Directory::create(layout.join("own")).unwrap();
        let found = with_own(layout, Some(&own), |work| {
            find_or_build(&own, &source.unwrap(), ImageForm::Any, work)
        });
        match found {
            Ok(Found::Image(found)) => format!("{:?}", found.how),
            Ok(Found::Ours(name)) => format!("{name}"),
            Err(error) => error.to_string(),
        }
    });
    let Some(measured) = measured else { return };
    println!("{measured:?}");
    assert!(measured.said.contains("Built"), "{measured:?}");
    assert!(measured.peak_bytes < 256 << 20, "{measured:?}");
}

/// Documents of 4 MiB with as many entries as fit.
#[test]
fn no_document_takes_much_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let of = |open: &str, one: &str, close: &str| {
        let count = ((4 << 20) - open.len() - close.len()) / one.len();
        [open, &one.repeat(count), close].concat()
    };
    let (manifests, entry) =
        (r#"{"schemaVersion":2,"manifests":["#, r#"{"mediaType":"","digest":"a:b","size":0}"#);
    let entries = of(manifests, &format!("{entry},"), &format!("{entry}]}}"));
    let open = |field: &str| format!("{manifests}{},{field}", &entry[..entry.len() - 1]);
    let urls = of(&open(r#""urls":["#), r#""","#, r#"""]}]}"#);
    let pairs: String = (0..350_000).map(|n| format!(r#""{n:x}":"","#)).collect();
    let annotations = format!(r#"{}{pairs}"x":""}}}}]}}"#, open(r#""annotations":{"#));
    for (name, text) in [
        ("nothings", of(r#"{"manifests":["#, "[],", "0]}")),
        ("entries", entries),
        ("urls", urls),
        ("annotations", annotations),
        ("layers", of(r#"{"rootfs":{"diff_ids":["#, r#""","#, "\"\"]}}")),
    ] {
        assert!(text.len() <= 4 << 20, "{name}: {}", text.len());
        let input = || {
            let path = folder.path().join(name);
            fs::write(&path, &text).unwrap();
            path
        };
        let measured = testkit::measure("no_document_takes_much_memory", name, input, |path| {
            burgeon_oci::fuzz::documents(&fs::read(path).unwrap()).to_string()
        });
        let Some(measured) = measured else { continue };
        println!("{name}: {measured:?}");
        assert!(measured.peak_bytes < 256 << 20, "{name}: {measured:?}");
    }
}

/// A registry may answer with sixteen pages of referrers.
#[test]
fn pages_of_referrers_do_not_add_up() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let input = || {
        let path = folder.path().join("page");
        fs::write(&path, format!(r#"{{"manifests":[{}0]}}"#, "[],".repeat(1_390_000))).unwrap();
        path
    };
    let test = "pages_of_referrers_do_not_add_up";
    let measured = testkit::measure(test, "pages", input, |path| {
        let page = fs::read(path).unwrap();
        burgeon_oci::fuzz::referrers_in(&vec![page; 16]).to_string()
    });
    let Some(measured) = measured else { return };
    println!("{measured:?}");
    assert!(measured.said == "0" && measured.peak_bytes < 256 << 20, "{measured:?}");
}
