//! House rules as a test.
//!
//! ```text
//!   cargo metadata ──► arrows between crates    only those of docs/architecture.md
//!                  ──► arrows of this file      each is one between crates
//!   */src/*.rs     ──► imports                  no circle of files (circles.rs)
//!   Cargo.lock     ──► crates                   none that is unmaintained or unwanted
//!   every text     ──► length, words, names     texts.rs
//!   dev/proofs.toml ─► texts to replace         each occurs once in its file
//!   dev/fuzz        ─► readers of FUZZED        each has a target, which is run
//! ```
//!
//! Invariant: each rule has a test below that shows it failing.

mod texts;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{cargo::cargo, circles, files::files, proofs};

/// Crates that must not appear in Cargo.lock, not even below others: unmaintained, or with a
/// better successor.
const BANNED_CRATES: &[&str] = &[
    "bincode",
    "serde_yaml",
    "paste",
    "rustls-pemfile",
    "tokio-tar",
    "proc-macro-error2",
    "ocipkg",
];

/// The feature of what a crate offers to tests, its own and those of others.
const FOR_TESTS: &str = "testing";

/// The picture of docs/architecture.md: each crate and its allowed dependencies.
const ARROWS: &[(&str, &[&str])] = &[
    ("burgeon-block", &[]),
    ("burgeon-accelerate", &["burgeon-block"]),
    ("burgeon-accelerator", &["burgeon-accelerate", "burgeon-block", "burgeon-frontend"]),
    ("burgeon-btrfs", &["burgeon-block"]),
    ("burgeon-cache", &["burgeon-block"]),
    ("burgeon-disks", &["burgeon-block"]),
    ("burgeon-image", &["burgeon-block", "burgeon-btrfs"]),
    ("burgeon-metrics", &["burgeon-block"]),
    ("burgeon-layer", &["burgeon-block"]),
    ("burgeon-source", &["burgeon-layer", "burgeon-block"]),
    ("burgeon-oci", &["burgeon-source", "burgeon-layer", "burgeon-image", "burgeon-block"]),
    ("burgeon-container", &["burgeon-oci", "burgeon-block"]),
    ("burgeon-volume", &["burgeon-block", "burgeon-cache", "burgeon-image"]),
    ("burgeon-frontend", &["burgeon-block"]),
    ("burgeon-sandbox", &["burgeon-block"]),
    ("burgeon-snapshotter", &["burgeon-block"]),
    (
        "burgeon-daemon",
        &[
            "burgeon-block",
            "burgeon-btrfs",
            "burgeon-cache",
            "burgeon-image",
            "burgeon-metrics",
            "burgeon-source",
            "burgeon-volume",
            "burgeon-frontend",
            "burgeon-sandbox",
        ],
    ),
    (
        "burgeon",
        &[
            "burgeon-accelerate",
            "burgeon-accelerator",
            "burgeon-daemon",
            "burgeon-container",
            "burgeon-oci",
            "burgeon-block",
            "burgeon-disks",
            "burgeon-image",
            "burgeon-metrics",
            "burgeon-snapshotter",
            "burgeon-source",
        ],
    ),
    ("accelerate-simulator", &["burgeon-accelerate", "burgeon-block", "testkit"]),
    ("buggy-accelerate", &["burgeon-block"]),
    ("buggy-accelerate-simulator", &["buggy-accelerate", "burgeon-block", "testkit"]),
    ("buggy-cache", &["burgeon-block"]),
    ("buggy-volume", &["burgeon-block", "burgeon-cache", "burgeon-image"]),
    (
        "buggy-simulator",
        &[
            "burgeon-block",
            "burgeon-btrfs",
            "burgeon-cache",
            "burgeon-image",
            "buggy-volume",
            "testkit",
        ],
    ),
    (
        "simulator",
        &[
            "burgeon-block",
            "burgeon-btrfs",
            "burgeon-cache",
            "burgeon-image",
            "burgeon-volume",
            "testkit",
        ],
    ),
    ("testkit", &[]),
    ("xtask", &["testkit"]),
];

/// Arrows of `ARROWS` that crates will have soon, and do not have yet.
const COMING: &[(&str, &str)] = &[];

/// The readers of hostile bytes: the target in dev/fuzz, and the call in it that reads them.
const FUZZED: &[(&str, &str)] = &[
    ("accelerate", "Super::decode("),
    ("accelerate", "Store::open("),
    ("cache", "reader.decode("),
    ("chunk", "decode_chunk("),
    ("compressed", "build("),
    ("derived", "Table::decode("),
    ("disks", "DriveReport::parse("),
    ("disks", "DiskRecords::decode("),
    ("documents", "documents("),
    ("extents", "ExtentMap::"),
    ("manifest", "Manifest::decode("),
    ("map", "AddressMap::from_bytes("),
    ("profile", "Profile::decode("),
    ("records", "HostRoots::decode("),
    ("records", "ImageRecord::decode("),
    ("seed_info", "SeedInfo::from_bytes("),
    ("snapshotter", "record::decode("),
    ("snapshotter", "Filter::parse("),
    ("sparse", "GNU.sparse.map"),
    ("tar", "describe_layers("),
    ("toc", "toc("),
];

/// The files with functions that decode or parse bytes, and the target in dev/fuzz that reaches
/// them; `None` for bytes of the kernel or of another process of the daemon.
const READERS: &[(&str, Option<&str>)] = &[
    ("crates/accelerate/src/format.rs", Some("accelerate")),
    ("crates/accelerate/src/record.rs", Some("accelerate")),
    ("crates/btrfs/src/info.rs", Some("seed_info")),
    ("crates/cache/src/checkpoint.rs", Some("cache")),
    ("crates/cache/src/journal.rs", Some("cache")),
    ("crates/daemon/src/host/mountinfo.rs", None),
    ("crates/daemon/src/opener.rs", None),
    ("crates/disks/src/report.rs", Some("disks")),
    ("crates/disks/src/state.rs", Some("disks")),
    ("crates/frontend/src/fuse.rs", None),
    ("crates/image/src/catalog/mod.rs", Some("records")),
    ("crates/image/src/catalog/roots.rs", Some("records")),
    ("crates/image/src/chunk.rs", Some("chunk")),
    ("crates/image/src/container.rs", Some("manifest")),
    ("crates/image/src/extents/format.rs", Some("extents")),
    ("crates/image/src/manifest/decode.rs", Some("manifest")),
    ("crates/image/src/map.rs", Some("map")),
    ("crates/image/src/objects.rs", Some("manifest")),
    ("crates/image/src/profile/format.rs", Some("profile")),
    ("crates/layer/src/table.rs", Some("derived")),
    ("crates/oci/src/document.rs", Some("documents")),
    ("crates/snapshotter/src/record.rs", Some("snapshotter")),
    ("crates/source/src/registry/artifact.rs", Some("documents")),
];

/// Checks everything and lists the faults.
pub(crate) fn run(root: &Path) -> Result<()> {
    let problems = problems(root)?;
    if problems.is_empty() {
        println!("tidy: nothing to complain about");
        return Ok(());
    }
    for problem in &problems {
        eprintln!("tidy: {problem}");
    }
    bail!("{} house rules are broken", problems.len())
}

fn problems(root: &Path) -> Result<Vec<String>> {
    let metadata = metadata(root)?;
    let mut problems = crate_arrows(&metadata, ARROWS)?;
    problems.extend(unused_arrows(&metadata, ARROWS, COMING));
    problems.extend(circles::problems(root)?);
    let picture = root.join("docs/architecture.md");
    if picture.exists() {
        problems.extend(picture_differs(&fs::read_to_string(picture)?, ARROWS));
    }
    problems.extend(proofs::problems(root)?);
    let fuzz = root.join("dev/fuzz");
    let list = fs::read_to_string(fuzz.join("Cargo.toml"))?;
    problems.extend(unfuzzed(&list, |target| {
        fs::read_to_string(fuzz.join(format!("fuzz_targets/{target}.rs"))).unwrap_or_default()
    }));
    problems.extend(banned_crates(&fs::read_to_string(root.join("Cargo.lock"))?));
    for path in files(root)? {
        // Fixtures and the like are not text.
        let Ok(text) = String::from_utf8(fs::read(&path)?) else { continue };
        let name = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
        problems.extend(texts::problems(&name, &text));
        problems.extend(unlisted_reader(&name, &text));
    }
    Ok(problems)
}

fn metadata(root: &Path) -> Result<Value> {
    let output = cargo(&["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Every dependency between members that `allowed` does not list. A crate's tests may use any
/// crate that does not in turn need this one.
fn crate_arrows(metadata: &Value, allowed: &[(&str, &[&str])]) -> Result<Vec<String>> {
    let allowed: BTreeMap<&str, &[&str]> = allowed.iter().copied().collect();
    let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
    let members: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut problems = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(targets) = allowed.get(name) else {
            problems.push(format!("crate {name} is not in the picture of docs/architecture.md"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let target = dependency["name"].as_str().unwrap_or_default();
            let for_tests = dependency["kind"].as_str() == Some("dev");
            let fine = targets.contains(&target)
                || for_tests && allowed.contains_key(target) && !reaches(&allowed, target, name);
            let has = |feature: &str| {
                let features = dependency["features"].as_array();
                features.into_iter().flatten().any(|it| it.as_str() == Some(feature))
            };
            if has(FOR_TESTS) && !for_tests {
                problems.push(format!(
                    "crate {name} has {target} with the feature {FOR_TESTS:?}: only its tests may"
                ));
            }
            if members.contains(target) && !fine {
                problems.push(format!(
                    "crate {name} depends on {target}: no such arrow in docs/architecture.md"
                ));
            }
        }
    }
    Ok(problems)
}

/// The arrows that no manifest has, except those in `coming`; and those in `coming` that are no
/// longer to come.
fn unused_arrows(
    metadata: &Value,
    allowed: &[(&str, &[&str])],
    coming: &[(&str, &str)],
) -> Vec<String> {
    let packages = || metadata["packages"].as_array().into_iter().flatten();
    let has = |name: &str, target: &str| {
        let package = packages().find(|package| package["name"].as_str() == Some(name));
        let dependencies = package.and_then(|package| package["dependencies"].as_array());
        dependencies.into_iter().flatten().any(|dependency| {
            // Tests need no arrow.
            dependency["name"].as_str() == Some(target)
                && dependency["kind"].as_str() != Some("dev")
        })
    };
    let mut problems = Vec::new();
    for (name, targets) in allowed {
        if !packages().any(|package| package["name"].as_str() == Some(name)) {
            problems.push(format!("ARROWS of dev/xtask/src/tidy.rs has {name}, which is no crate"));
            continue;
        }
        for target in targets.iter().filter(|target| !has(name, target)) {
            if !coming.contains(&(name, target)) {
                problems.push(format!(
                    "crate {name} does not depend on {target}: take the arrow from ARROWS of \
                     dev/xtask/src/tidy.rs and from docs/architecture.md"
                ));
            }
        }
    }
    for (name, target) in coming.iter().filter(|(name, target)| has(name, target)) {
        problems.push(format!(
            "crate {name} depends on {target} by now: take it from COMING of dev/xtask/src/tidy.rs"
        ));
    }
    problems
}

fn reaches(allowed: &BTreeMap<&str, &[&str]>, from: &str, to: &str) -> bool {
    allowed
        .get(from)
        .is_some_and(|targets| targets.iter().any(|t| *t == to || reaches(allowed, t, to)))
}

/// Compares the lines `name ──► a, b   what it is` of the drawing with the arrows checked here.
/// Crates for development need not be drawn.
fn picture_differs(picture: &str, allowed: &[(&str, &[&str])]) -> Vec<String> {
    let short = |name: &str| match name {
        "burgeon" => "cli".to_owned(),
        other => other.strip_prefix("burgeon-").unwrap_or(other).to_owned(),
    };
    let mut problems = Vec::new();
    for (name, targets) in allowed {
        let checked: BTreeSet<String> = targets.iter().map(|target| short(target)).collect();
        let drawn = picture.lines().find_map(|line| drawn_arrows(line, &short(name)));
        match drawn {
            Some(drawn) if drawn == checked => {}
            None if !name.starts_with("burgeon") => {}
            None => {
                problems.push(format!("docs/architecture.md draws no arrows for {}", short(name)))
            }
            Some(drawn) => problems.push(format!(
                "docs/architecture.md draws {} ──► {drawn:?}, but the arrows are {checked:?}: \
                 change both",
                short(name)
            )),
        }
    }
    problems
}

/// The crates that `line` lets `name` point at, if it is that crate's line of the drawing.
fn drawn_arrows(line: &str, name: &str) -> Option<BTreeSet<String>> {
    let rest = line.trim_start().strip_prefix(name)?.strip_prefix(' ')?;
    let rest = rest.strip_prefix('─')?.trim_start_matches('─').strip_prefix("► ")?;
    let list = rest.split("  ").next().unwrap_or(rest);
    let words = list.split(',').map(str::trim).filter(|word| *word != "(nothing)");
    Some(words.map(str::to_owned).collect())
}

/// A file of a crate that decodes or parses bytes, and that `READERS` does not list.
fn unlisted_reader(name: &Path, text: &str) -> Option<String> {
    let name =
        name.to_str().filter(|name| name.starts_with("crates/") && name.contains("/src/"))?;
    let takes_bytes = |rest: &str| {
        let signature = rest.split('{').next().unwrap_or_default();
        let is_reader = ["decode", "from_bytes", "parse"].iter().any(|it| rest.starts_with(it));
        is_reader && (signature.contains("[u8]") || signature.contains("Vec<u8>"))
    };
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let reads = code.match_indices("fn ").any(|(at, word)| takes_bytes(&code[at + word.len()..]));
    if !reads || READERS.iter().any(|(file, _)| *file == name) {
        return None;
    }
    Some(format!("{name}: reads bytes: name its fuzz target in READERS of dev/xtask/src/tidy.rs"))
}

/// The readers that no target of the fuzz crate with the manifest `list` reads.
fn unfuzzed(list: &str, text: impl Fn(&str) -> String) -> Vec<String> {
    let is_missing = |(target, call): &&(&str, &str)| {
        let is_run = list.contains(&format!("\nname = \"{target}\"\n"));
        !is_run || !text(target).contains(call)
    };
    let missing = FUZZED.iter().filter(is_missing);
    missing
        .map(|(target, call)| format!("dev/fuzz: the target {target} does not read by {call:?}"))
        .collect()
}

fn banned_crates(lock: &str) -> Vec<String> {
    let named = |name: &&&str| lock.contains(&format!("\nname = \"{name}\"\n"));
    let banned = BANNED_CRATES.iter().filter(named);
    banned.map(|name| format!("Cargo.lock holds the banned crate {name}")).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::{ARROWS, banned_crates, crate_arrows, picture_differs, problems, unused_arrows};

    #[test]
    fn a_reader_without_a_fuzz_target_is_named() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
        let list = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        let text = |target: &str| {
            std::fs::read_to_string(root.join(format!("fuzz_targets/{target}.rs"))).unwrap()
        };
        assert_eq!(super::unfuzzed(&list, text), [""; 0]);
        let named = super::unfuzzed(&list.replace("\"toc\"", "\"other\""), text);
        assert_eq!(named.len(), 1, "{named:?}");
        assert_eq!(super::unfuzzed(&list, |_| String::new()).len(), super::FUZZED.len());
        let has_target = |target: &str| super::FUZZED.iter().any(|(name, _)| *name == target);
        let targets = super::READERS.iter().filter_map(|(_, target)| *target);
        assert!(targets.clone().all(has_target), "{targets:?}");
        let named = |name: &str, text: &str| super::unlisted_reader(Path::new(name), text);
        let reader = "    pub(crate) fn decode_it(\n        bytes: &[u8],\n    ) -> u8 {";
        assert!(named("crates/oci/src/new.rs", reader).is_some());
        assert_eq!(named("crates/oci/src/document.rs", reader), None);
        assert_eq!(named("crates/oci/tests/new.rs", reader), None);
        assert_eq!(named("crates/oci/src/new.rs", "fn parse(text: &str) { [u8] }"), None);
    }

    #[test]
    fn this_workspace_is_tidy() {
        let problems = problems(&crate::root()).unwrap();
        assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    }

    fn workspace(from: &str, to: &str, kind: Option<&str>) -> serde_json::Value {
        json!({ "packages": [
            { "name": from, "dependencies": [{ "name": to, "kind": kind }] },
            { "name": to, "dependencies": [{ "name": "libc", "kind": null }] },
        ]})
    }

    #[test]
    fn an_arrow_that_is_not_drawn_is_found() {
        let found =
            |from, to, kind| !crate_arrows(&workspace(from, to, kind), ARROWS).unwrap().is_empty();
        assert!(!found("burgeon-image", "burgeon-btrfs", None));
        assert!(found("burgeon-btrfs", "burgeon-image", None));
        assert!(found("burgeon-volume", "burgeon-source", None));
        assert!(!found("burgeon-volume", "burgeon-source", Some("dev")));
        assert!(found("burgeon-volume", "burgeon-daemon", Some("dev")));
        assert!(found("burgeon-frontend", "testkit", None));
        assert!(!found("burgeon-frontend", "testkit", Some("dev")));
        assert!(!found("burgeon-volume", "burgeon-btrfs", Some("dev")));
        assert!(found("burgeon-volume", "burgeon-btrfs", None));
        assert!(found("newcomer", "burgeon-block", None));
    }

    #[test]
    fn code_for_tests_in_the_product_is_found() {
        let mut workspace = workspace("burgeon-volume", "burgeon-cache", None);
        assert_eq!(crate_arrows(&workspace, ARROWS).unwrap().len(), 0);
        let dependency = &mut workspace["packages"][0]["dependencies"][0];
        dependency["features"] = json!(["testing"]);
        assert_eq!(crate_arrows(&workspace, ARROWS).unwrap().len(), 1);
        workspace["packages"][0]["dependencies"][0]["kind"] = json!("dev");
        assert_eq!(crate_arrows(&workspace, ARROWS).unwrap().len(), 0);
    }

    #[test]
    fn an_arrow_that_nobody_uses_is_found() {
        let arrows: &[(&str, &[&str])] = &[("a", &["b"]), ("b", &[])];
        let faults = |kind, coming| unused_arrows(&workspace("a", "b", kind), arrows, coming).len();
        assert_eq!((faults(None, &[]), faults(Some("dev"), &[])), (0, 1));
        assert_eq!((faults(None, &[("a", "b")]), faults(Some("dev"), &[("a", "b")])), (1, 0));
        let more: &[(&str, &[&str])] = &[("a", &["b"]), ("b", &[]), ("c", &[])];
        assert_eq!(unused_arrows(&workspace("a", "b", None), more, &[]).len(), 1);
    }

    #[test]
    fn a_drawing_that_says_otherwise_is_found() {
        let arrows: &[(&str, &[&str])] =
            &[("burgeon-block", &[]), ("burgeon-btrfs", &["burgeon-block"])];
        let good = "  btrfs ───► block   writes ──► seeds\n  block ─► (nothing)  words\n";
        assert_eq!(picture_differs(good, arrows), Vec::<String>::new());
        let wrong = "  block ───► btrfs   words\n";
        assert_eq!(picture_differs(wrong, arrows).len(), 2);
    }

    #[test]
    fn a_banned_crate_is_found() {
        assert_eq!(banned_crates("[[package]]\nname = \"bincode\"\nversion").len(), 1);
        assert!(banned_crates("[[package]]\nname = \"bincode-not\"\nversion").is_empty());
    }
}
