//! House rules for the text of each file.
//!
//! ```text
//!   every *.rs     ──► length, words       at most LINES_MAX lines, no unfinished marks
//!   crates/*/src   ──► names of objects    their kind is read in block/src/object.rs only
//!                  ──► names of images     reserved ones are read in catalog/reserved.rs only
//!   every text     ──► words               no path of somebody's machine
//!   *.rs *.md *.toml ► terms               those that everybody knows
//!   *.rs           ──► comments            at most COLUMNS_MAX columns, except drawings and tables
//! ```
//!
//! Invariant: each rule has a test below that shows it failing.

use std::path::Path;

/// The longest source file, in lines.
const LINES_MAX: usize = 600;

/// The widest line of prose in a comment, in columns.
const COLUMNS_MAX: usize = 100;

/// Words that must not appear in source files. Split so that this file passes its own check.
const BANNED_IN_SOURCE: &[&str] = &[
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("#[", "ignore"),
    concat!("dbg", "!("),
    concat!("FIX", "ME"),
];

/// Terms of our own that were replaced, and the usual ones. Split so that this file passes its own
/// check. A term is also found in a name: its words are those between `_`, or begin with a capital
/// letter.
const REPLACED_TERMS: &[(&str, &str)] = &[
    (concat!("pa", "ce"), "throttle, or request window"),
    (concat!("spa", "re seed"), "recycled seed"),
    (concat!("bro", "ught back"), "resumed"),
    (concat!("bri", "ng back"), "resume"),
    (concat!("bri", "ngs back"), "resumes"),
    (concat!("str", "ay"), "leftover"),
    (concat!("str", "ays"), "leftovers"),
    (concat!("ordi", "nary"), "OCI image, or the thing that is absent"),
    (concat!("un", "summed"), "without checksums"),
    (concat!("kee", "per"), "server monitor"),
    (concat!("rev", "ive"), "reconnect"),
    (concat!("ob", "ey"), "handle"),
    (concat!("he", "ed"), "handle"),
    (concat!("se", "at"), "permit"),
    (concat!("she", "lf"), "referrers"),
    (concat!("bo", "ard"), "join, or start"),
    (concat!("f", "ly"), "fetch task"),
    (concat!("lan", "ded"), "fetched, or is there"),
    (concat!("sabo", "tage"), "fault injection"),
];

/// A text about the past, which may use any term.
const HISTORY: &str = "CHANGELOG.md";

/// Code that reads or writes the kind of an object in its name; a folder follows each text. The
/// kind decides which objects an image may refer to, so it is parsed in one place:
/// `ObjectId::kind`, `ObjectKind::object`.
const KIND_BY_HAND: &[&str] =
    &["starts_with(\"", "strip_prefix(\"", "trim_start_matches(\"", "ObjectId::new(format!(\""];

/// The folders of `ObjectKind`.
const KINDS: &[&str] = &[
    "packs",
    "manifests",
    "images",
    "profiles",
    "roots",
    "leases",
    "derived",
    "origins",
    "held",
    "layers",
    "file",
    "computed",
];

/// Code that reads or writes a reserved name of an image. Such a name decides whether a host trusts
/// an image, so it is parsed and printed in one place: `ReservedName`.
const RESERVED_BY_HAND: &[&str] = &[
    "starts_with(\"sha256:",
    "strip_prefix(\"sha256:",
    "\"url:\"",
    "\"url:{",
    "\"/index\"",
    "\"/contents\"",
    "}/index\"",
    "}/contents\"",
    "}/toc\"",
    "\"contents\"",
];

/// The files that read the texts of `RESERVED_BY_HAND`: `ReservedName`, and the digests of
/// registries, which are no names.
const RESERVED_READERS: &[&str] =
    &["crates/image/src/catalog/reserved.rs", "crates/source/src/registry/digest.rs"];

/// Paths of one machine, which must not appear in any text.
const BANNED_EVERYWHERE: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/fa", "rm/"), concat!("/ro", "ot/.")];

/// The faults of the file `name`, which holds `text`.
pub(super) fn problems(name: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let shown = name.display();
    let source = name.extension().is_some_and(|e| e == "rs");
    let lines = text.lines().count();
    if source && lines > LINES_MAX {
        problems
            .push(format!("{shown} has {lines} lines (at most {LINES_MAX}): give it one subject"));
    }
    let banned = BANNED_IN_SOURCE.iter().filter(|_| source).chain(BANNED_EVERYWHERE);
    for word in banned {
        for (index, _) in text.lines().enumerate().filter(|(_, line)| line.contains(word)) {
            problems.push(format!("{shown}:{}: {word:?} must not stand here", index + 1));
        }
    }
    problems.extend(names_by_hand(name, text));
    problems.extend(replaced_terms(name, text));
    problems.extend(wide_comments(name, text));
    problems
}

/// Lines of prose in comments that are too wide. A drawing lies between two fences.
fn wide_comments(name: &Path, text: &str) -> Vec<String> {
    let is_source = name.extension().is_some_and(|e| e == "rs");
    if !is_source {
        return Vec::new();
    }
    let (mut problems, mut is_drawing) = (Vec::new(), false);
    for (index, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_drawing = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!', ' ']);
        is_drawing ^= comment.starts_with("```");
        let is_prose = !is_drawing && !comment.starts_with('|');
        if is_prose && line.chars().count() > COLUMNS_MAX {
            let at = index + 1;
            problems.push(format!(
                "{}:{at}: wrap the comment at {COLUMNS_MAX} columns",
                name.display()
            ));
        }
    }
    problems
}

/// Lines with a term that was replaced.
fn replaced_terms(name: &Path, text: &str) -> Vec<String> {
    let is_prose = name.extension().is_some_and(|e| e == "rs" || e == "md" || e == "toml");
    if !is_prose || name == Path::new(HISTORY) {
        return Vec::new();
    }
    let mut problems = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words = words(line);
        for (term, usual) in REPLACED_TERMS {
            let term: Vec<&str> = term.split(' ').collect();
            if words.windows(term.len()).any(|words| words == term) {
                let (at, term) = (index + 1, term.join(" "));
                problems.push(format!("{}:{at}: say {usual}, not {term:?}", name.display()));
            }
        }
    }
    problems
}

/// The words of `line` in small letters, with those that names are made of.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for name in line.split(|letter: char| !letter.is_alphabetic()) {
        let mut word = String::new();
        for letter in name.chars() {
            if letter.is_uppercase() && word.ends_with(char::is_lowercase) {
                words.push(std::mem::take(&mut word).to_lowercase());
            }
            word.push(letter);
        }
        if !word.is_empty() {
            words.push(word.to_lowercase());
        }
    }
    words
}

/// Lines of a crate that tell the kind of an object by its name, or read the reserved name of an
/// image. Tests may write names out.
fn names_by_hand(name: &Path, text: &str) -> Vec<String> {
    let mut parts = name.components().map(|part| part.as_os_str());
    if parts.next() != Some("crates".as_ref()) || parts.nth(1) != Some("src".as_ref()) {
        return Vec::new();
    }
    let product = text.split("#[cfg(test)]").next().unwrap_or_default();
    let has_kind = |line: &str| {
        let after = KIND_BY_HAND.iter().filter_map(|call| Some(line.split_once(call)?.1));
        let folders = after.filter_map(|rest| Some(rest.split_once('/')?.0));
        folders.into_iter().any(|folder| KINDS.contains(&folder))
    };
    let may_read_reserved = RESERVED_READERS.iter().any(|reader| name == Path::new(reader));
    let has_reserved =
        |line: &str| !may_read_reserved && RESERVED_BY_HAND.iter().any(|text| line.contains(text));
    let mut problems = Vec::new();
    for (index, line) in product.lines().enumerate() {
        let at = format!("{}:{}", name.display(), index + 1);
        if has_kind(line) {
            problems.push(format!("{at}: ask ObjectId for its kind, or make it with ObjectKind"));
        }
        if has_reserved(line) {
            problems.push(format!("{at}: read and make reserved names with ReservedName"));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::problems;

    #[test]
    fn long_files_and_banned_words_are_found() {
        let source = Path::new("a.rs");
        assert!(problems(source, &"x\n".repeat(600)).is_empty());
        assert_eq!(problems(source, &"x\n".repeat(601)).len(), 1);
        assert!(problems(Path::new("a.md"), &"x\n".repeat(601)).is_empty());
        assert_eq!(problems(source, concat!("to", "do!()")).len(), 1);
        assert_eq!(problems(source, concat!("#[ig", "nore = \"slow\"]")).len(), 1);
        assert_eq!(problems(Path::new("a.md"), concat!("see /wo", "rk/x")).len(), 1);
    }

    #[test]
    fn a_term_of_our_own_is_found_in_text_and_in_names() {
        let found = |name: &str, line: &str| problems(Path::new(name), line).len();
        let term = concat!("pa", "ce");
        for line in [
            format!("the {term}, which"),
            format!("fn {term}_of()"),
            format!("struct Slow{}{}", &term[..1].to_uppercase(), &term[1..]),
            format!("{} of a write", term.to_uppercase()),
            concat!("it is bro", "ught  back").to_owned(),
            concat!("fn bri", "ng_back()").to_owned(),
        ] {
            assert_eq!(found("a.rs", &line), 1, "{line}");
            assert_eq!(found("docs/a.md", &line), 1, "{line}");
            assert_eq!((found("CHANGELOG.md", &line), found("a.sh", &line)), (0, 0), "{line}");
        }
        assert_eq!(found("a.rs", &format!("name{term}, {term}r, s{term}: bring it back")), 0);
    }

    #[test]
    fn a_comment_that_is_too_wide_is_found_and_a_drawing_may_be_wider() {
        let found = |name: &str, text: &str| problems(Path::new(name), text).len();
        let wide = "w ".repeat(50);
        for comment in ["// ", "/// ", "//! ", "    // "] {
            assert_eq!(found("crates/x/src/a.rs", &format!("{comment}{wide}")), 1, "{comment}");
        }
        let drawing = format!("//! ```text\n//! {wide}\n//! ```\n//!\n");
        assert_eq!(found("a.rs", &drawing), 0);
        assert_eq!(found("a.rs", &format!("{drawing}//! {wide}")), 1, "behind a drawing");
        assert_eq!(found("a.rs", &format!("/// | a | {wide} |\nlet a = \"{wide}\";")), 0);
        assert_eq!(found("a.md", &format!("// {wide}")), 0);
    }

    #[test]
    fn a_kind_that_is_read_by_hand_is_found() {
        let found = |name: &str, line: &str| problems(Path::new(name), line).len();
        let product = "crates/x/src/a.rs";
        assert_eq!(found(product, "if name.starts_with(\"file/\") {"), 1);
        assert_eq!(found(product, "ObjectId::new(format!(\"packs/{digest}\"))"), 1);
        assert_eq!(found(product, "name.strip_prefix(\"derived/\")\nx.strip_prefix(\"held/\")"), 2);
        assert_eq!(
            found(product, "path.starts_with(\"sys/file/\"); format!(\"manifests/{tag}\")"),
            0
        );
        assert_eq!(found(product, "#[cfg(test)]\nobject.starts_with(\"file/\")"), 0);
        assert_eq!(found("crates/x/tests/a.rs", "object.starts_with(\"file/\")"), 0);
    }

    #[test]
    fn a_reserved_name_that_is_read_by_hand_is_found() {
        let found = |name: &str, line: &str| problems(Path::new(name), line).len();
        let product = "crates/x/src/a.rs";
        for line in [
            "if name.starts_with(\"sha256:\") {",
            "let is_index = name.ends_with(\"/index\");",
            "format!(\"{digest}/toc\")",
            "Some((_, \"contents\")) => true,",
            "format!(\"url:{hex}\")",
        ] {
            assert_eq!(found(product, line), 1, "{line}");
            assert_eq!(found(super::RESERVED_READERS[0], line), 0, "{line}");
            assert_eq!(found("crates/x/tests/a.rs", line), 0, "{line}");
        }
        assert_eq!(found(product, "\"the digest (sha256:…) of the index\""), 0);
    }
}
