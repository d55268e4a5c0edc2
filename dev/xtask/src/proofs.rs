//! Proofs that tests of mended defects mean something: each fails when its mend is undone.
//!
//! ```text
//!   dev/proofs.toml ──► the tree, copied to target/proofs/tree ──► every test ──► must pass
//!                                   │ undo: replacements of text
//!                                   └──────────────► build ──► its test ──► must fail, in time
//! ```
//!
//! All tests pass on the tree as it is before the first undo, so nothing is compiled for that
//! alone. From one undo to the next, cargo compiles the changes of the two.
//!
//! Invariants:
//! - Every text that an undo replaces occurs exactly once in its file; `cargo xtask tidy` checks
//!   that, so a proof cannot rot unnoticed (`tests::a_text_that_is_not_there_is_found`).
//! - A test that does not end proves nothing
//!   (`trial::tests::a_program_that_does_not_end_is_ended`).

mod copy;
mod trial;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use self::trial::{Trial, Verdict};

/// The list of proofs, below the workspace's root.
const LIST: &str = "dev/proofs.toml";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run these proofs only: those of a line (`7`), or one of them (`7.2`, the second of line 7).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Begin with this line or proof: go on where an earlier run ended.
    #[arg(long)]
    from: Option<String>,
    /// Check that each undo compiles and that its test fails, but not that it passes without the
    /// undo.
    #[arg(long)]
    red_only: bool,
    /// Show the proofs and run none.
    #[arg(long)]
    list: bool,
    /// Time limit of a test in seconds, without its compilation.
    #[arg(long, default_value_t = 300)]
    limit: u64,
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
    /// Its number among the proofs of the line, from 1.
    #[serde(skip)]
    number: usize,
    /// The property that holds since the defect was mended.
    says: String,
    /// Arguments of `cargo test --locked`: package, test program, and the test's name.
    test: Vec<String>,
    /// The edits that take the mend away.
    undo: Vec<Replacement>,
}

#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Replacement {
    file: PathBuf,
    find: String,
    replace: String,
}

impl Proof {
    fn id(&self) -> String {
        format!("{}.{}", self.line, self.number)
    }

    /// True if `id` names this proof or its line.
    fn is(&self, id: &str) -> bool {
        self.line == id || self.id() == id
    }
}

/// Runs the proofs. An error names each proof that does not hold.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let proofs = wanted(read(root)?, options)?;
    if options.list {
        proofs.iter().for_each(|proof| println!("{:<6} {}", proof.id(), proof.says));
        return Ok(());
    }
    let tree = root.join("target/proofs/tree");
    copy::copy_tree(root, &tree)?;
    let trial = Trial::new(root, &tree, Duration::from_secs(options.limit))?;
    let mut report = Report::default();
    if !options.red_only {
        let mut tests: Vec<_> = proofs.iter().map(|proof| &proof.test).collect();
        tests.sort();
        tests.dedup();
        for test in tests {
            report.add(&test.join(" "), "green", || green(&trial, test));
        }
    }
    for proof in &proofs {
        let name = format!("{:<6} {}", proof.id(), proof.says);
        report.add(&name, "red", || red(&trial, &tree, proof));
    }
    report.finish()
}

/// The proofs that were asked for.
fn wanted(proofs: Vec<Proof>, options: &Options) -> Result<Vec<Proof>> {
    let known = |id: &String| {
        ensure!(proofs.iter().any(|proof| proof.is(id)), "{LIST} has no line or proof {id}");
        Ok(())
    };
    options.only.iter().chain(&options.from).try_for_each(known)?;
    let before = |proof: &Proof| options.from.as_ref().is_some_and(|id| !proof.is(id));
    let named = |proof: &Proof| options.only.is_empty() || options.only.iter().any(|o| proof.is(o));
    Ok(proofs.into_iter().skip_while(before).filter(named).collect())
}

/// The result of each step, shown as it ends and once more at the end.
#[derive(Default)]
struct Report {
    lines: Vec<String>,
    wrong: usize,
}

impl Report {
    fn add(&mut self, name: &str, good: &str, step: impl FnOnce() -> Result<Verdict>) {
        let started = Instant::now();
        let outcome = step();
        let took = started.elapsed().as_secs();
        let line = match outcome {
            Ok(verdict) => {
                let (tested, left) = (verdict.took.as_secs(), verdict.left.join("; "));
                verdict.said.iter().for_each(|said| println!("        {said}"));
                let left = if left.is_empty() { left } else { format!(" (left behind: {left})") };
                format!("{good:<6} {took:>4} s {tested:>4} s  {name}{left}")
            }
            Err(error) => {
                self.wrong += 1;
                format!("WRONG  {took:>4} s    - s  {name}: {error:#}")
            }
        };
        println!("{line}");
        // The output may be a file that somebody follows.
        let _ = std::io::stdout().flush();
        self.lines.push(line);
    }

    fn finish(self) -> Result<()> {
        println!("\nresult   took   test");
        self.lines.iter().for_each(|line| println!("{line}"));
        println!("{} passed, {} failed", self.lines.len() - self.wrong, self.wrong);
        ensure!(self.wrong == 0, "{} proofs do not hold", self.wrong);
        Ok(())
    }
}

/// Problems of the list itself, found without running anything.
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
    let List { mut proof } = toml::from_str(&text).with_context(|| format!("{LIST} is damaged"))?;
    for index in 0..proof.len() {
        let earlier = proof[..index].iter().filter(|other| other.line == proof[index].line);
        proof[index].number = earlier.count() + 1;
    }
    Ok(proof)
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

fn green(trial: &Trial, test: &[String]) -> Result<Verdict> {
    trial.build(test)?;
    let verdict = trial.run(test)?;
    let (passed, said) = (verdict.passed, &verdict.said);
    ensure!(verdict.failed == 0 && verdict.good, "it fails with the mend:\n{}", said.join("\n"));
    ensure!(passed > 0, "no test has that name");
    Ok(verdict)
}

fn red(trial: &Trial, tree: &Path, proof: &Proof) -> Result<Verdict> {
    let mut files = BTreeMap::new();
    for Replacement { file, find, replace } in &proof.undo {
        let path = tree.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        let (_, undone) = files.entry(path).or_insert_with(|| (text.clone(), text));
        ensure!(undone.matches(find.as_str()).count() == 1, "{} has changed", file.display());
        *undone = undone.replacen(find.as_str(), replace, 1);
    }
    for (path, (_, undone)) in &files {
        fs::write(path, undone)?;
    }
    let verdict = trial.build(&proof.test).and_then(|()| trial.run(&proof.test));
    for (path, (text, _)) in &files {
        fs::write(path, text)?;
    }
    let verdict = verdict?;
    if verdict.good {
        bail!("its test passes although the mend is undone");
    }
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::{List, Options, misfits, wanted};

    fn list(lines: &[&str]) -> List {
        let proof = |line: &&str| {
            format!(
                "[[proof]]\nline = '{line}'\nsays = 'x'\ntest = ['-p', 'x']\n\
                 undo = [{{ file = 'a', find = 'one', replace = '' }}]\n"
            )
        };
        toml::from_str(&lines.iter().map(proof).collect::<String>()).unwrap()
    }

    #[test]
    fn a_text_that_is_not_there_is_found() {
        let list = list(&["1"]);
        let count = |text: &'static str| misfits(&list.proof[0], |_| text.into()).len();
        assert_eq!((count("one"), count("one one"), count("two")), (0, 1, 1));
    }

    #[test]
    fn a_key_that_nobody_knows_is_refused() {
        assert!(toml::from_str::<List>("[[proof]]\nline = '1'\nwrong = 1").is_err());
    }

    #[test]
    fn proofs_are_chosen_by_line_and_number() {
        let chosen = |only: &[&str], from: Option<&str>| {
            let mut proofs = list(&["1", "2", "2", "3"]).proof;
            proofs.iter_mut().zip([1, 1, 2, 1]).for_each(|(proof, number)| proof.number = number);
            let only = only.iter().map(|&id| id.to_owned()).collect();
            let from = from.map(str::to_owned);
            let options = Options { only, from, red_only: true, list: false, limit: 1 };
            let proofs = wanted(proofs, &options);
            proofs.map(|proofs| proofs.iter().map(super::Proof::id).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&["2", "3.1"], None).unwrap(), ["2.1", "2.2", "3.1"]);
        assert_eq!(chosen(&[], Some("2.2")).unwrap(), ["2.2", "3.1"]);
        assert_eq!(chosen(&["1", "2"], Some("2")).unwrap(), ["2.1", "2.2"]);
        assert!(chosen(&["4"], None).is_err());
        assert!(chosen(&[], Some("2.3")).is_err());
    }
}
