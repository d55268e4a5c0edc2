use super::*;

fn id(name: &str) -> ObjectId {
    ObjectId::new(name).unwrap()
}

fn store() -> (tempfile::TempDir, Directory) {
    let folder = tempfile::tempdir().unwrap();
    let store = Directory::create(folder.path().join("store")).unwrap();
    (folder, store)
}

#[test]
fn publishes_reads_lists_and_removes() {
    let (_folder, store) = store();
    store.publish(&id("packs/b"), b"hello world").unwrap();
    store.publish(&id("packs/a"), b"").unwrap();
    assert_eq!(store.list("packs").unwrap(), [id("packs/a"), id("packs/b")]);
    assert_eq!(store.list("images/").unwrap(), []);
    assert_eq!(store.len(&id("packs/b")).unwrap(), Some(11));
    assert_eq!(store.len(&id("packs/c")).unwrap(), None);
    let range = ByteRange::at(6, 5).unwrap();
    assert_eq!(store.read_now(&id("packs/b"), range).unwrap(), b"world"[..]);
    assert_eq!(store.get(&id("packs/b"), 11).unwrap(), b"hello world"[..]);
    assert_eq!(store.get(&id("packs/b"), 10).unwrap_err().kind(), ErrorKind::Invalid);
    store.remove(&id("packs/b")).unwrap();
    store.remove(&id("packs/b")).unwrap();
    assert_eq!(store.get(&id("packs/b"), 11).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn short_objects_are_corrupt_and_a_missing_store_is_unavailable() {
    let (folder, store) = store();
    store.publish(&id("packs/b"), b"hello").unwrap();
    let range = ByteRange::at(3, 5).unwrap();
    assert_eq!(store.read_now(&id("packs/b"), range).unwrap_err().kind(), ErrorKind::Corrupt);
    fs::rename(folder.path().join("store"), folder.path().join("away")).unwrap();
    let error = store.read_now(&id("packs/b"), range).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[test]
fn files_are_published_by_rename_from_the_scratch_folder() {
    let (_folder, store) = store();
    let lease = store.begin_write().unwrap();
    let path = lease.scratch().join("pack");
    fs::write(&path, b"data").unwrap();
    store.publish_file(&id("packs/x"), &path).unwrap();
    assert!(!path.exists());
    assert_eq!(store.get(&id("packs/x"), 4).unwrap(), b"data"[..]);
    drop(lease);
    assert_eq!(fs::read_dir(store.root().join("tmp")).unwrap().count(), 0);
}

/// A FIFO blocks an open for ever, unless it has a writer.
#[test]
fn only_regular_files_are_objects_and_locks() {
    let (folder, store) = store();
    store.publish(&id("packs/file"), b"file").unwrap();
    let fifo = |name: &str| {
        let path = store.root().join(name);
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600));
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).unwrap();
        path
    };
    fifo("packs/fifo");
    fs::create_dir(store.root().join("packs/folder")).unwrap();
    std::os::unix::net::UnixListener::bind(store.root().join("packs/socket")).unwrap();
    std::os::unix::fs::symlink("/dev/null", store.root().join("packs/device")).unwrap();
    for name in ["packs/folder", "packs/fifo", "packs/socket", "packs/device"] {
        let range = ByteRange::at(0, 1).unwrap();
        for error in
            [store.get(&id(name), 100).unwrap_err(), store.read_now(&id(name), range).unwrap_err()]
        {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error}");
            let said = format!("{error:?}");
            assert!(said.contains("is not a regular file"), "{name}: {said}");
        }
    }
    // Others' leftovers go, and no symlink leads a writer elsewhere.
    fs::remove_file(store.root().join("lock")).unwrap();
    let lock = fifo("lock");
    assert!(store.begin_write().is_err() && store.begin_collect().is_err());
    fs::remove_file(&lock).unwrap();
    let elsewhere = folder.path().join("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, &lock).unwrap();
    assert!(store.begin_collect().is_err() && !elsewhere.exists());
    fs::remove_file(&lock).unwrap();
    let left = [fifo("tmp/left.part"), fifo("tmp/partial-packs-a")];
    assert!(store.partial(&id("packs/a"), 100).is_err());
    store.begin_collect().unwrap();
    assert!(left.iter().all(|path| path.symlink_metadata().is_err()));
}

#[test]
fn old_layers_that_no_image_has_go_without_a_collector() {
    let (_folder, store) = store();
    for name in ["layers/needed", "layers/old", "layers/new"] {
        store.publish(&id(name), b"layer").unwrap();
    }
    store.publish(&id("held/image"), b"layers/needed\n").unwrap();
    let long_ago = std::time::SystemTime::now() - 2 * PARTIAL_AGE;
    for name in ["layers/needed", "layers/old"] {
        let file = File::options().write(true).open(store.path_of(&id(name))).unwrap();
        file.set_modified(long_ago).unwrap();
    }
    // Not while a writer is active: it records the layers it uses only at its end.
    let writer = store.begin_write().unwrap();
    store.publish(&id("layers/late"), b"layer").unwrap();
    assert!(!store.path_of(&id("layers/old")).exists(), "before it began, nobody wrote");
    let late = store.path_of(&id("layers/late"));
    File::options().write(true).open(&late).unwrap().set_modified(long_ago).unwrap();
    drop(store.begin_write().unwrap());
    assert!(late.exists());
    drop(writer);
    store.sweep();
    assert_eq!(store.list("layers").unwrap(), [id("layers/needed"), id("layers/new")]);
    // Without a list that can be read, nothing goes.
    store.publish(&id("held/endless"), &vec![b'x'; HELD_MAX as usize + 1]).unwrap();
    store.remove(&id("held/image")).unwrap();
    store.sweep();
    assert_eq!(store.list("layers").unwrap(), [id("layers/needed"), id("layers/new")]);
}

#[test]
fn the_collector_spares_live_writers_and_removes_what_dead_ones_left() {
    let (_folder, store) = store();
    let lease = store.begin_write().unwrap();
    fs::write(lease.scratch().join("pack"), b"live").unwrap();
    let dead = store.root().join("tmp/dead");
    fs::create_dir(&dead).unwrap();
    fs::write(dead.join("pack"), b"1234567").unwrap();
    fs::write(store.root().join("tmp/left.part"), b"123").unwrap();
    let collecting = store.begin_collect().unwrap();
    assert_eq!((collecting.writers, collecting.stale_bytes), (1, 10));
    assert!(lease.scratch().join("pack").exists() && !dead.exists());
}

#[test]
fn folders_of_others_are_not_reached_through_symlinks() {
    let (_folder, store) = store();
    store.publish(&id("packs/a"), b"of the store").unwrap();
    let foreign = tempfile::tempdir().unwrap();
    let theirs = ["a", "1-2-3"].map(|name| foreign.path().join(name));
    theirs.iter().for_each(|file| fs::write(file, "theirs").unwrap());
    for part in ["tmp", "packs"] {
        let place = store.root().join(part);
        let _ = fs::remove_dir_all(&place);
        std::os::unix::fs::symlink(foreign.path(), &place).unwrap();
        let refused = |done: Result<()>| {
            let refused = done.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
            assert!(refused.to_string().contains("symlink"), "{refused}");
        };
        match part {
            "tmp" => {
                refused(store.begin_collect().map(drop));
                refused(store.begin_count().map(drop));
                refused(store.stale_bytes().map(drop));
                refused(store.begin_write().map(drop));
                refused(store.partial(&id("packs/b"), 10).map(drop));
                store.sweep();
            }
            _ => {
                refused(store.list("packs").map(drop));
                refused(store.remove(&id("packs/a")));
                refused(store.publish(&id("packs/b"), b"new"));
            }
        }
        fs::remove_file(&place).unwrap();
        assert!(theirs.iter().all(|file| fs::read(file).unwrap() == b"theirs"), "{part}");
    }
    assert_eq!(fs::read_dir(foreign.path()).unwrap().count(), 2);
}

#[test]
fn a_count_removes_nothing() {
    let (_folder, store) = store();
    let left = store.make_tmp().unwrap().join("left.part");
    fs::write(&left, b"123").unwrap();
    assert_eq!(store.begin_count().unwrap().stale_bytes, 3);
    assert!(left.exists());
    assert_eq!(store.begin_collect().unwrap().stale_bytes, 3);
    assert!(!left.exists());
}
