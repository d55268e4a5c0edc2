//! Layers that an image lists several times, and layers that several processes fetch at once.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Barrier,
    thread,
};

use burgeon_image::builder::BuildOptions;
use burgeon_oci::{
    Documents, Found, ImageForm, Pull, ReadLayers, Source, Tags, Work, build, find_or_build,
};
use burgeon_source::{Access, Directory};
use testkit::OciLayout;

const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

fn with_work<T>(spool: &Path, own: &Directory, what: impl FnOnce(&Work<'_>) -> T) -> T {
    let (access, options) = (Access::default(), BuildOptions::default());
    let tags = Tags { folder: &spool.join("tags"), pull: Pull::Newer };
    let documents = Documents::new(spool.join("documents"));
    what(&Work {
        access: &access,
        tags,
        documents: &documents,
        read: &ReadLayers::default(),
        spool,
        own: Some(own),
        content: None,
        allocate: &|_, _, _| true,
        options: &options,
        fetching: &|_, _| (),
        building: &|_| (),
    })
}

/// A layout in `folder` that lists one layer `times` times.
fn layout(folder: &Path, times: usize, tar: &[u8]) -> (PathBuf, Source) {
    let layout = folder.join("layout");
    let layer = testkit::gzip(tar, 6);
    OciLayout::by_hand(&layout, None, &vec![(GZIP, layer); times], |_| ()).unwrap();
    let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap().unwrap();
    (layout, source)
}

/// An archive of one file.
fn one_file() -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let data = testkit::like_programs(1, 100_000);
    let mut header = tar::Header::new_gnu();
    header.set_size(data.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, "file", &data[..]).unwrap();
    tar.into_inner().unwrap()
}

/// Mounts make the image in this way.
fn inodes(own: &Directory, source: &Source, spool: &Path) -> Result<u64, String> {
    match with_work(spool, own, |work| find_or_build(own, source, ImageForm::Any, work)) {
        Ok(Found::Image(found)) => Ok(found.image.inodes),
        Ok(Found::Ours(name)) => Err(name.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn an_image_may_list_a_layer_many_times() {
    let folder = tempfile::tempdir().unwrap();
    let (_, source) = layout(folder.path(), 20, &one_file());
    for round in 0..4 {
        let own = Directory::create(folder.path().join(format!("own-{round}"))).unwrap();
        assert_eq!(inodes(&own, &source, folder.path()), Ok(2), "round {round}");
        let stored = fs::read_dir(folder.path().join(format!("own-{round}/layers"))).unwrap();
        assert_eq!(stored.count(), 1);
        let built = with_work(folder.path(), &own, |work| build(&own, &source, "built", work));
        built.unwrap();
    }
}

/// Locks of files are held by open files, so threads with stores of their own stand for processes.
#[test]
fn two_processes_may_fetch_a_layer_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (_, source) = layout(folder.path(), 1, &one_file());
    for round in 0..30 {
        let root = folder.path().join(format!("own-{round}"));
        Directory::create(&root).unwrap();
        let begin = Barrier::new(4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let own = Directory::create(&root).unwrap();
                    begin.wait();
                    assert_eq!(inodes(&own, &source, folder.path()), Ok(2), "round {round}");
                });
            }
        });
    }
}

/// A layer of empty files accounts for as much memory as its stored bytes, once.
#[test]
fn a_repeated_layer_accounts_for_no_more_memory() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let input = || {
        let mut header = tar::Header::new_gnu();
        header.set_path("empty").unwrap();
        header.set_size(0);
        header.set_cksum();
        let tar = [header.as_bytes().repeat(20_000), vec![0; 1024]].concat();
        layout(folder.path(), 60, &tar).0
    };
    let test = "a_repeated_layer_accounts_for_no_more_memory";
    let measured = testkit::measure(test, "60 times", input, |layout| {
        let source = Source::parse(&format!("oci-layout:{}", layout.display())).unwrap().unwrap();
        let own = Directory::create(layout.join("own")).unwrap();
        inodes(&own, &source, layout).unwrap_err()
    });
    let Some(measured) = measured else { return };
    assert!(measured.said.contains("MiB"), "{measured:?}");
    assert!(measured.peak_bytes < 256 << 20, "{measured:?}");
}
