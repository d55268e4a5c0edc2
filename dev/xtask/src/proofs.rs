//! Proofs that tests of mended defects mean something: each fails when its mend is undone.
//!
//! ```text
//!   dev/proofs.toml ──► the tree, copied to target/proofs/tree ──► test ──► must pass
//!                                   │ undo: replacements of text
//!                                   └──────────────────────────► test ──► must compile, run, and fail
//! ```
//!
//! Invariant: every text that an undo replaces occurs exactly once in its file; `cargo xtask tidy`
//! checks that, so a proof cannot rot unnoticed (`tests::a_text_that_is_not_there_is_found`).

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

/// The list of proofs, below the workspace's root.
const LIST: &str = "dev/proofs.toml";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run the proofs of these lines only.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Check that each undo compiles and that its test fails, but not that it passes without the undo.
    #[arg(long)]
    red_only: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(default)]
    proof: Vec<Proof>,
}

/// One mended defect.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Proof {
    /// The line of the issue that names the defect.
    line: String,
    /// What holds since it was mended.
    says: String,
    /// Arguments of `cargo test --locked`: package, test program, and the test's name.
    test: Vec<String>,
    /// What takes the mend away.
    undo: Vec<Replacement>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Replacement {
    file: PathBuf,
    find: String,
    replace: String,
}

/// How a test run ended.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// So many tests passed, and none failed.
    Green(u64),
    Red,
    /// Nothing was run: the code did not compile.
    Broken,
}

/// Runs the proofs. An error names each proof that does not hold.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let wanted = |proof: &Proof| options.only.is_empty() || options.only.contains(&proof.line);
    let proofs: Vec<_> = read(root)?.into_iter().filter(wanted).collect();
    ensure!(!proofs.is_empty(), "no proof in {LIST} has the line {:?}", options.only);
    let tree = root.join("target/proofs/tree");
    copy_tree(root, &tree)?;
    let mut wrong = Vec::new();
    for proof in &proofs {
        let name = format!("line {}: {}", proof.line, proof.says);
        let outcome = prove(&tree, proof, options.red_only);
        match &outcome {
            Ok(()) => println!("proved  {name}"),
            Err(error) => println!("WRONG   {name}: {error:#}"),
        }
        if outcome.is_err() {
            wrong.push(name);
        }
    }
    println!("{} passed, {} failed", proofs.len() - wrong.len(), wrong.len());
    ensure!(wrong.is_empty(), "these proofs do not hold: {}", wrong.join("; "));
    Ok(())
}

/// What is wrong with the list itself, without running anything.
pub(crate) fn problems(root: &Path) -> Result<Vec<String>> {
    if !root.join(LIST).exists() {
        return Ok(Vec::new());
    }
    let text = |file: &Path| fs::read_to_string(root.join(file)).unwrap_or_default();
    Ok(read(root)?.iter().flat_map(|proof| misfits(proof, text)).collect())
}

fn read(root: &Path) -> Result<Vec<Proof>> {
    let text =
        fs::read_to_string(root.join(LIST)).with_context(|| format!("cannot read {LIST}"))?;
    let list: List = toml::from_str(&text).with_context(|| format!("{LIST} is damaged"))?;
    Ok(list.proof)
}

/// The replacements of `proof` whose text does not occur exactly once.
fn misfits(proof: &Proof, text: impl Fn(&Path) -> String) -> Vec<String> {
    let name = format!("{LIST}, line {} ({})", proof.line, proof.says);
    let mut problems: Vec<_> =
        [(proof.undo.is_empty(), "undoes nothing"), (proof.test.is_empty(), "names no test")]
            .into_iter()
            .filter(|(wrong, _)| *wrong)
            .map(|(_, what)| format!("{name}: {what}"))
            .collect();
    for Replacement { file, find, .. } in &proof.undo {
        let count = text(file).matches(find.as_str()).count();
        if count != 1 {
            problems.push(format!(
                "{name}: its text occurs {count} times in {}, instead of once: {:?}",
                file.display(),
                find.lines().next().unwrap_or_default()
            ));
        }
    }
    problems
}

fn prove(tree: &Path, proof: &Proof, red_only: bool) -> Result<()> {
    if !red_only {
        let verdict = test(tree, &proof.test)?;
        let green = matches!(verdict, Verdict::Green(tests) if tests > 0);
        ensure!(green, "with the mend its test is not green: {verdict:?}");
    }
    let mut originals = Vec::new();
    for Replacement { file, find, replace } in &proof.undo {
        let path = tree.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        ensure!(text.matches(find.as_str()).count() == 1, "{} has changed", file.display());
        fs::write(&path, text.replacen(find.as_str(), replace, 1))?;
        originals.push((path, text));
    }
    let verdict = test(tree, &proof.test);
    // In reverse: a file may be named twice.
    for (path, text) in originals.into_iter().rev() {
        fs::write(path, text)?;
    }
    match verdict? {
        Verdict::Red => Ok(()),
        Verdict::Green(_) => bail!("its test passes although the mend is undone"),
        Verdict::Broken => bail!("the code does not compile when the mend is undone"),
    }
}

/// Compiles and runs one test in `tree`. Compiling comes first, so that it is told from failing.
fn test(tree: &Path, arguments: &[String]) -> Result<Verdict> {
    let cargo = |more: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        let split = arguments.iter().position(|a| a == "--").unwrap_or(arguments.len());
        command.args(["test", "--quiet", "--locked"]).args(&arguments[..split]).args(more);
        if more.is_empty() {
            command.args(&arguments[split..]);
        }
        command.current_dir(tree).env("CARGO_TARGET_DIR", tree.with_file_name("build"));
        command.stdin(Stdio::null()).output().context("cannot run cargo")
    };
    let built = cargo(&["--no-run"])?;
    if !built.status.success() {
        eprintln!("{}", String::from_utf8_lossy(&built.stderr));
        return Ok(Verdict::Broken);
    }
    let output = cargo(&[])?;
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = text.lines().map(|line| crate::outcome::result_line(line).passed).sum();
    Ok(if output.status.success() { Verdict::Green(passed) } else { Verdict::Red })
}

/// Makes `tree` the same as what git knows of `root`, as it lies there. Files that are the same keep their
/// times, so that cargo compiles nothing twice.
fn copy_tree(root: &Path, tree: &Path) -> Result<()> {
    let list = |options: &[&str]| -> Result<Vec<PathBuf>> {
        let mut command = Command::new("git");
        command.arg("ls-files").arg("-z").args(options).current_dir(root);
        let output = command.output().context("cannot run git")?;
        ensure!(output.status.success(), "git ls-files: {}", output.status);
        let names = output.stdout.split(|b| *b == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| PathBuf::from(String::from_utf8_lossy(name).into_owned())).collect())
    };
    fs::create_dir_all(tree)?;
    let names = list(&["--cached", "--others", "--exclude-standard"])?;
    // A test program that is gone must not be compiled from the copy.
    for path in crate::tidy::files(tree)? {
        if path.strip_prefix(tree).is_ok_and(|name| names.iter().all(|n| n != name)) {
            fs::remove_file(&path)?;
        }
    }
    for name in names {
        let (from, to) = (root.join(&name), tree.join(&name));
        let Ok(bytes) = fs::read(&from) else {
            // Removed, and git has not been told.
            let _ = fs::remove_file(&to);
            continue;
        };
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            continue;
        }
        fs::create_dir_all(to.parent().context("a file without a folder")?)?;
        fs::write(&to, bytes).with_context(|| format!("{}", to.display()))?;
        fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{List, misfits};

    #[test]
    fn a_text_that_is_not_there_is_found() {
        let list: List = toml::from_str(
            "[[proof]]\nline = '1'\nsays = 'x'\ntest = ['-p', 'x']\n\
             undo = [{ file = 'a', find = 'one', replace = '' }]",
        )
        .unwrap();
        let count = |text: &'static str| misfits(&list.proof[0], |_| text.into()).len();
        assert_eq!((count("one"), count("one one"), count("two")), (0, 1, 1));
    }

    #[test]
    fn a_key_that_nobody_knows_is_refused() {
        assert!(toml::from_str::<List>("[[proof]]\nline = '1'\nwrong = 1").is_err());
    }
}
