//! Man pages and shell completions, made from the command line's definition by `burgeon __docs`.
//!
//! ```text
//!   args::Args ──► man1/burgeon.1, man1/burgeon-mount.1, …      one page for each verb
//!   helper     ──► man8/mount.burgeon.8                         mount(8)'s helper
//!              ──► burgeon.bash, _burgeon, burgeon.fish         completions
//! ```
//!
//! Invariant: each verb has a page, which mandoc and man find no fault with
//! (`crates/cli/tests/documents.rs`).

use std::{
    ffi::OsString,
    fs,
    io::{Result, Write},
    path::Path,
    process::ExitCode,
};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, roman},
};

use crate::{args::Args, helper};

/// The files of the program, for the section FILES of each page.
const FILES: &str = "\
/etc/burgeon/config.toml         the configuration: each key is explained in it
/etc/burgeon/config.d/*.toml     settings that replace those of config.toml, by name
/var/lib/burgeon                 state directory of root: store, caches, writes, socket
~/.local/state/burgeon           state directory of other users
STATE/writes/NAME                the kept writes of `mount --writes NAME`
STATE/store                      the store of images without --store
STATE/run/daemon.log             the daemon's log where systemd does not run
burgeon.service                  the unit of the daemon of /var/lib/burgeon";

/// Headings of clap's help, and the sections of a man page that take their place.
const SECTIONS: [(&str, &str); 3] =
    [("Examples:", "EXAMPLES"), ("Exit codes:", "EXIT STATUS"), ("Environment:", "ENVIRONMENT")];

/// `burgeon __docs DIR DATE`: writes all pages and completions below DIR. DATE is that of the
/// pages.
pub(crate) fn process(arguments: &[OsString]) -> ExitCode {
    let [folder, date] = arguments else {
        eprintln!("burgeon: __docs takes a folder and the date of the pages");
        return ExitCode::from(2);
    };
    match write(Path::new(folder), &date.to_string_lossy()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("burgeon: cannot write documents to {}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}

fn write(folder: &Path, date: &str) -> Result<()> {
    let pages = folder.join("man1");
    fs::create_dir_all(&pages)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Args::command(), "burgeon", folder)?;
    }
    let mut root = Args::command().disable_help_subcommand(true);
    root.build();
    let common = blocks(&help_after(&root));
    write_pages(&pages, &root, date, &common)?;
    let (pages, helper) = (folder.join("man8"), helper::command());
    fs::create_dir_all(&pages)?;
    let environment: Vec<_> =
        common.into_iter().filter(|block| block.section == "ENVIRONMENT").collect();
    let page = page(&helper, ("mount.burgeon", "8"), date, &environment)?;
    fs::write(pages.join("mount.burgeon.8"), page)
}

/// Writes the page of the verb, and those of the verbs below it.
fn write_pages(folder: &Path, verb: &Command, date: &str, common: &[Block]) -> Result<()> {
    for below in verb.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        write_pages(folder, below, date, common)?;
    }
    let name = verb.get_display_name().unwrap_or(verb.get_name()).to_owned();
    let page = page(verb, (&name, "1"), date, common)?;
    fs::write(folder.join(format!("{name}.1")), page)
}

/// The page of one command.
fn page(
    verb: &Command,
    (name, section): (&str, &str),
    date: &str,
    common: &[Block],
) -> Result<Vec<u8>> {
    let man = Man::new(verb.clone())
        .title(name.to_uppercase())
        .section(section)
        .date(date)
        .source(format!("burgeon {}", env!("CARGO_PKG_VERSION")))
        .manual("Burgeon");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if verb.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let own = blocks(&help_after(verb));
    // The sections that the root alone has belong to each verb.
    let missing = common.iter().filter(|block| block.section != "EXAMPLES");
    let missing = missing.filter(|block| own.iter().all(|own| own.section != block.section));
    for block in own.iter().chain(missing) {
        block.render(&mut page)?;
    }
    Block { section: "FILES", text: FILES.to_owned() }.render(&mut page)?;
    see_also(verb, name, &mut page)?;
    Ok(page)
}

fn see_also(verb: &Command, name: &str, page: &mut Vec<u8>) -> Result<()> {
    let mut text = match name {
        "burgeon" => "mount(8), mount.burgeon(8), umount(8), btrfs(5)".to_owned(),
        "mount.burgeon" => "mount(8), fstab(5), burgeon-mount(1)".to_owned(),
        _ => "burgeon(1)".to_owned(),
    };
    for below in verb.get_subcommands().filter(|_| name != "burgeon") {
        text += &format!(", {name}-{}(1)", below.get_name());
    }
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(text)]);
    roff.to_writer(page)
}

fn help_after(verb: &Command) -> String {
    let help = verb.get_after_long_help().or_else(|| verb.get_after_help());
    help.map(ToString::to_string).unwrap_or_default()
}

/// A section of a page whose lines stay as they are.
struct Block {
    section: &'static str,
    text: String,
}

impl Block {
    fn render(&self, page: &mut dyn Write) -> Result<()> {
        let mut roff = Roff::new();
        roff.control("SH", [self.section]);
        roff.control("nf", []);
        for line in self.text.lines() {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
        roff.to_writer(page)
    }
}

/// The sections of a help text: each heading with the lines indented below it. Other lines are
/// notes.
fn blocks(help: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    for line in help.lines().filter(|line| !line.trim().is_empty()) {
        let heading = SECTIONS.iter().find(|(heading, _)| *heading == line);
        if let Some((_, section)) = heading {
            blocks.push(Block { section, text: String::new() });
            continue;
        }
        let is_note = !line.starts_with(' ');
        if is_note && blocks.last().is_none_or(|block| block.section != "NOTES") {
            blocks.push(Block { section: "NOTES", text: String::new() });
        }
        if let Some(block) = blocks.last_mut() {
            block.text += line.strip_prefix("  ").unwrap_or(line);
            block.text.push('\n');
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::blocks;

    #[test]
    fn headings_of_help_become_sections() {
        let help = "Examples:\n  a b\n  c\n\nA note.\n\nExit codes:\n  0  done";
        let found = blocks(help);
        let found: Vec<_> = found.iter().map(|it| (it.section, it.text.as_str())).collect();
        let expected =
            [("EXAMPLES", "a b\nc\n"), ("NOTES", "A note.\n"), ("EXIT STATUS", "0  done\n")];
        assert_eq!(found, expected);
    }
}
