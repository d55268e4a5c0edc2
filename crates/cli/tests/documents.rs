//! Man pages and completions: each verb has them, and other programs find no fault with them.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_burgeon");

/// Faults of clap_mangen's own: it breaks lines twice around lists of values.
const ACCEPTED: &str = "WARNING: skipping paragraph macro: br";

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().unwrap()
}

/// The documents in a new folder.
fn documents() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let made = output(PROGRAM, &["__docs", folder.path().to_str().unwrap(), "2026-01-31"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    folder
}

fn pages(folder: &Path, section: &str) -> Vec<PathBuf> {
    let pages = fs::read_dir(folder.join(section)).unwrap();
    pages.map(|page| page.unwrap().path()).collect()
}

/// The verbs that `--help` lists below those of `line`.
fn verbs(line: &[String]) -> Vec<String> {
    let help = Command::new(PROGRAM).args(line).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let Some((_, list)) = help.split_once("Commands:\n") else { return Vec::new() };
    let rows = list.lines().take_while(|row| !row.is_empty());
    let names = rows.filter(|row| row.starts_with("  ") && !row.starts_with("   "));
    let names = names.filter_map(|row| row.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn each_verb_has_a_page_with_the_common_sections() {
    let folder = documents();
    let mut waiting = vec![Vec::new()];
    let mut count = 0;
    while let Some(line) = waiting.pop() {
        let name = [vec!["burgeon".to_owned()], line.clone()].concat().join("-");
        let page = folder.path().join(format!("man1/{name}.1"));
        let text = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{page:?}: {error}"));
        for section in ["NAME", "SYNOPSIS", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"] {
            let heading = [format!(".SH {section}\n"), format!(".SH \"{section}\"\n")];
            assert!(heading.iter().any(|it| text.contains(it)), "{name}: no {section}");
        }
        waiting.extend(verbs(&line).into_iter().map(|verb| [line.clone(), vec![verb]].concat()));
        count += 1;
    }
    assert!(count > 25, "--help lists {count} verbs");
    assert_eq!(pages(folder.path(), "man1").len(), count, "no page of another verb");
    let helper = fs::read_to_string(folder.path().join("man8/mount.burgeon.8")).unwrap();
    for part in ["MOUNT.BURGEON 8", "NAMESPACE", "32 mount failed", "EXIT STATUS", "SEE ALSO"] {
        assert!(helper.contains(part), "{part}: {helper}");
    }
}

#[test]
fn readers_of_man_pages_find_no_fault() {
    let folder = documents();
    for page in ["man1", "man8"].into_iter().flat_map(|section| pages(folder.path(), section)) {
        let page = page.to_str().unwrap();
        if is_there("mandoc") {
            let lint = output("mandoc", &["-T", "lint", "-W", "warning", page]);
            let said = String::from_utf8(lint.stdout).unwrap();
            let faults: Vec<_> = said.lines().filter(|line| !line.contains(ACCEPTED)).collect();
            assert!(faults.is_empty(), "{faults:#?}");
        }
        if is_there("man") {
            let shown = output("man", &["--warnings", "-E", "UTF-8", "-l", page]);
            let said = String::from_utf8_lossy(&shown.stderr).into_owned();
            assert!(shown.status.success() && said.is_empty(), "{page}: {said}");
            assert!(String::from_utf8_lossy(&shown.stdout).contains("EXIT STATUS"), "{page}");
        }
    }
}

#[test]
fn shells_read_the_completions() {
    let folder = documents();
    for (shell, file) in [("bash", "burgeon.bash"), ("zsh", "_burgeon"), ("fish", "burgeon.fish")] {
        let file = folder.path().join(file);
        assert!(fs::read_to_string(&file).unwrap().contains("create-empty"), "{file:?}");
        let read = output(shell, &["-n", file.to_str().unwrap()]);
        assert!(read.status.success(), "{shell}: {}", String::from_utf8_lossy(&read.stderr));
    }
    let script = r#"
        source "$1"
        COMP_WORDS=(burgeon mou); COMP_CWORD=1
        _burgeon burgeon mou burgeon
        echo "${COMPREPLY[@]}""#;
    let file = folder.path().join("burgeon.bash");
    let done = output("bash", &["-c", script, "bash", file.to_str().unwrap()]);
    assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "mount");
}

fn is_there(program: &str) -> bool {
    output("sh", &["-c", "command -v \"$0\"", program]).status.success()
}
