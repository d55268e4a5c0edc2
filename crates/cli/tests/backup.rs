//! Backups of kept writes, by the commands of `docs/operations.md`, and what becomes of copies.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path, process::Command};

use testkit::{Burgeon, Rng, Space};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");
const LIMIT: &str = "256M";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The commands of `docs/operations.md` that begin with one of `programs`, in order, with this
/// test's places for those of the document.
fn recipe(programs: &[&str], places: &[(&str, &Path)]) -> Vec<String> {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations.md");
    let document = fs::read_to_string(document).unwrap();
    let section = document.split("## Backup of writes").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let ours = |line: &&str| programs.iter().any(|program| line.starts_with(program));
    let put = |word: &str| {
        let place = places.iter().find_map(|(from, to)| Some((to, word.strip_prefix(from)?)));
        place.map_or(word.to_owned(), |(to, rest)| format!("{}{rest}", text(to)))
    };
    let put_all = |line: &str| line.split(' ').map(put).collect::<Vec<_>>().join(" ");
    section.lines().filter(ours).map(put_all).collect()
}

/// Runs the lines of a shell, each of which must succeed.
fn run_all(lines: &[String]) {
    let done = Command::new("sh").args(["-ec", &lines.join("\n")]).output().unwrap();
    assert!(done.status.success(), "{lines:#?}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn the_documented_backups_of_writes_bring_everything_back() {
    let space = Space::new("backup");
    let tree = space.make_folder("tree");
    fs::write(tree.join("data"), Rng::new(31).bytes(5_000_000)).unwrap();
    let burgeon = Burgeon::new(PROGRAM, &space);
    burgeon.build(&tree, "sample");
    let (at, backup) = (space.path("at"), space.make_folder("backup"));
    let options = ["--writes", "a", "--write-limit", LIMIT];
    let mounted = burgeon.mount("sample", &at, &options);
    let written = Rng::new(32).bytes(700_000);
    fs::write(at.join("written"), &written).unwrap();
    let is_whole = |folder: &Path| {
        fs::read(folder.join("written")).ok().as_ref() == Some(&written)
            && fs::read(folder.join("data")).unwrap() == fs::read(tree.join("data")).unwrap()
    };

    // Of a live mount: a read-only snapshot.
    let lines = recipe(&["btrfs ", "tar "], &[("/mnt/a", &at), ("/backup", &backup)]);
    assert_eq!(lines.len(), 3, "{lines:#?}");
    run_all(&lines);
    let restored = space.make_folder("restored");
    let tar = format!("tar --extract -C {} -f {}", text(&restored), text(&backup.join("a.tar")));
    run_all(&[tar]);
    assert!(is_whole(&restored) && !at.join(".backup").exists());

    // Of a folder that is not mounted, put back under another name.
    burgeon.umount(mounted);
    let places = [("/var/lib/burgeon", burgeon.state()), ("/backup", &*backup)];
    let lines = recipe(&["cp "], &places);
    assert_eq!(lines.len(), 1, "{lines:#?}");
    run_all(&lines);
    burgeon.ok(&["writes", "rm", "a"]);
    run_all(&[format!("cp -a {} {}", text(&backup.join("a")), text(&backup.join("b")))]);
    fs::rename(backup.join("a"), burgeon.state().join("writes/a")).unwrap();
    let mounted = burgeon.mount("sample", &at, &options);
    assert!(is_whole(&at));
    // A copy beside the live writes has a name of its own, and is mounted after them.
    let copy = burgeon.state().join("writes/b");
    run_all(&[format!("cp -a --sparse=always {} {}", text(&backup.join("b")), text(&copy))]);
    let beside = space.make_folder("beside");
    let refused = ["mount", "sample", text(&beside), "--writes", "b"];
    burgeon.fails(&refused, 5, "only one of them can be mounted at a time");
    fs::write(at.join("written"), b"of the original").unwrap();
    burgeon.umount(mounted);
    let listed = burgeon.ok(&["writes", "list"]);
    let has = |name| listed.lines().any(|line| line.split_whitespace().next() == Some(name));
    assert!(has("a") && has("b"), "{listed}");
    let mounted = burgeon.mount("sample", &at, &["--writes", "b", "--write-limit", LIMIT]);
    assert!(is_whole(&at));
    burgeon.umount(mounted);
    burgeon.ok(&["writes", "rm", "b"]);
    assert!(burgeon.state().join("writes/a/sprout").exists());
}
