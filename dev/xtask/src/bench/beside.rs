//! This program beside another build of it, such as the static one: the same reads in turn.

use std::fs;

use anyhow::{Context, Result};

use super::{
    Bench,
    burgeon::Burgeon,
    reads::{FILE, Target, WAYS, materialise, random_file, ratios, take_turns},
    table::{Aim, Table},
};

/// The other build may be 5 % slower.
const AIM: f64 = 0.95;

pub(crate) fn measure(bench: &Bench, table: &mut Table) -> Result<()> {
    let other = bench.options.beside.as_ref().context("name the other program by --beside")?;
    let other = other.canonicalize().with_context(|| format!("{} is missing", other.display()))?;
    let tree = bench.path("beside-tree");
    fs::create_dir_all(&tree)?;
    random_file(&tree.join(FILE), bench.options.file_mib)?;
    let mut installed = Vec::new();
    let mut targets = Vec::new();
    for (name, program) in [("other", &other), ("ours", &bench.program)] {
        let burgeon = Burgeon::new(program, bench.path(&format!("beside-{name}-state")));
        let at = bench.path(&format!("beside-{name}"));
        burgeon.run(&["build", &tree.to_string_lossy(), "image"])?;
        burgeon.mount("image", &at)?;
        materialise(&at.join(FILE))?;
        targets.push(Target::from(at.join(FILE)));
        installed.push((burgeon, at));
    }
    let rates = take_turns(bench, &WAYS, &targets)?;
    for (burgeon, at) in &installed {
        burgeon.umount(at)?;
    }
    let what = format!("A cached hit: {} ÷ {}", other.display(), bench.program.display());
    ratios(table, what, &WAYS, &rates, (0, 1), |_| Aim::AtLeast(AIM));
    Ok(())
}
