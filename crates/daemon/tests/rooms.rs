//! Checks the arrows between the rooms of this crate, as drawn in `src/lib.rs`: a room uses only
//! those below it.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The rooms from the bottom up, and the crate's items that each may name. A room may always name
/// itself, and `log`, which depends on nothing.
const ROOMS: [(&str, &[&str]); 17] = [
    ("id", &[]),
    ("sync", &[]),
    ("host", &["id"]),
    ("state", &["id", "host"]),
    ("ipc", &["id", "host", "state"]),
    ("transport", &["id", "host", "state", "ipc"]),
    ("roles", &["host", "state", "transport"]),
    ("prepare", &["id", "host", "state", "ipc", "roles"]),
    ("reader", &["host", "ipc", "roles"]),
    ("start", &["id", "host", "state", "ipc"]),
    ("opener", &["id", "host", "state", "ipc", "transport", "roles"]),
    ("server", &["id", "sync", "host", "state", "ipc", "roles", "opener"]),
    ("holder", &["id", "host", "state", "ipc", "roles", "start"]),
    (
        "supervisor",
        &[
            "id",
            "host",
            "state",
            "ipc",
            "transport",
            "roles",
            "prepare",
            "start",
            "holder",
            "opener",
        ],
    ),
    ("read_only", &["id", "host", "state", "ipc"]),
    ("rehearsal", &["state", "host", "ipc", "start"]),
    (
        ACTIONS,
        &[
            "id",
            "host",
            "state",
            "ipc",
            "transport",
            "roles",
            "start",
            "holder",
            "supervisor",
            "read_only",
            "rehearsal",
        ],
    ),
];

/// Actions of commands with the daemon, or without it: modules that do not know each other.
const ACTIONS: &str = "doctor, orphan, upgrade, let_go";

#[test]
fn rooms_know_only_those_below_them() {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    read(&source, &source, &mut found);
    for room in ["id", "host", "state", "ipc", "supervisor", "server"] {
        assert!(found.contains_key(room), "no room {room}");
    }
    let mut wrong = Vec::new();
    for (room, names) in &found {
        let is_action = ACTIONS.split(", ").any(|action| action == room);
        let of = if is_action { ACTIONS } else { room };
        let Some((_, allowed)) = ROOMS.iter().find(|(name, _)| *name == of) else {
            // Events, which know no room.
            wrong.extend((room != "log").then(|| format!("{room} is no room of src/lib.rs")));
            continue;
        };
        let is_wrong = |name: &&String| {
            *name != room && !allowed.contains(&name.as_str()) && !name.starts_with("log")
        };
        wrong.extend(names.iter().filter(is_wrong).map(|name| format!("{room} -> {name}")));
    }
    assert!(wrong.is_empty(), "arrows that src/lib.rs does not draw: {wrong:#?}");
}

#[test]
fn the_first_names_of_a_path_are_found() {
    let text = "use crate::{\n    a::{b, c},\n    d,\n};\n// crate::e\ncrate::f::g();";
    assert_eq!(names(text), ["a", "d", "f"].map(str::to_owned).into());
}

/// Collects the names used by each room below `folder`.
fn read(source: &Path, folder: &Path, found: &mut BTreeMap<String, BTreeSet<String>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read(source, &path, found);
        } else if path.file_name().unwrap() != "lib.rs" {
            let first = path.strip_prefix(source).unwrap().iter().next().unwrap();
            let room = first.to_str().unwrap().trim_end_matches(".rs").to_owned();
            let text = fs::read_to_string(&path).unwrap();
            found.entry(room).or_default().extend(names(&text));
        }
    }
}

/// The first names of all paths in `text` that begin at the crate, except in comments.
fn names(text: &str) -> BTreeSet<String> {
    let code: Vec<_> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join("\n");
    let first = |path: &str| -> String {
        path.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut names = BTreeSet::new();
    for path in code.split("crate::").skip(1) {
        let Some(group) = path.strip_prefix('{') else {
            names.insert(first(path));
            continue;
        };
        let mut depth = 0;
        let mut item = String::new();
        for c in group.chars() {
            match c {
                ',' if depth == 0 => names.extend([first(&std::mem::take(&mut item))]),
                '}' if depth == 0 => break,
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => item.push(c),
            }
        }
        names.insert(first(&item));
    }
    names.remove("");
    names
}
