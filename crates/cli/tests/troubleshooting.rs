//! The messages that docs/troubleshooting.md explains are those of the program.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

/// The quoted words in the first column of tables whose heading is a message.
#[test]
fn troubleshooting_explains_messages_that_exist() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut source = String::new();
    let mut folders = vec![checkout.join("crates"), checkout.join("dist/deb")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else if let Ok(text) = fs::read_to_string(entry.path()) {
                // A literal may go on in the next line.
                let lines = text.split("\\\n").map(str::trim_start);
                source += &lines.collect::<Vec<_>>().join("").replace("\\`", "`");
            }
        }
    }
    let page = fs::read_to_string(checkout.join("docs/troubleshooting.md")).unwrap();
    let (mut is_of_messages, mut count) = (false, 0);
    for row in page.lines() {
        let Some(row) = row.strip_prefix('|') else {
            is_of_messages = false;
            continue;
        };
        let first = row.split(" | ").next().unwrap().trim();
        is_of_messages |= first.starts_with("message");
        for words in first.split('`').skip(1).step_by(2).filter(|_| is_of_messages) {
            assert!(source.contains(words), "no source says {words:?}");
            count += 1;
        }
    }
    assert!(count > 20, "{count} messages");
}
