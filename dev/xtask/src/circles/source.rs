//! The modules, imports and paths in the text of a source file.
//!
//! ```text
//!   text ─► tokens, without comments and literals ─► without #[cfg(test)] items
//!                       ├─► mod x;                 children
//!                       ├─► use a::{b as c, d};    imports: c ─► a::b, d ─► a::d
//!                       └─► a::b::c                paths
//! ```
//!
//! No parser of Rust: it knows just enough of the grammar for paths.

/// The names in a source file.
#[derive(Default)]
pub(super) struct Source<'a> {
    /// Modules in files of their own.
    pub(super) children: Vec<&'a str>,
    pub(super) imports: Vec<Import<'a>>,
    pub(super) paths: Vec<Used<'a>>,
}

/// A name that `use` declares.
pub(super) struct Import<'a> {
    /// The modules inside the file around it.
    pub(super) scope: Vec<&'a str>,
    pub(super) name: &'a str,
    pub(super) path: Vec<&'a str>,
}

/// A path of at least two names.
pub(super) struct Used<'a> {
    /// The modules inside the file around it.
    pub(super) scope: Vec<&'a str>,
    pub(super) path: Vec<&'a str>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token<'a> {
    /// A name, keyword or number.
    Word(&'a str),
    /// `::`
    Separator,
    Mark(char),
}

use Token::{Mark, Separator, Word};

impl<'a> Source<'a> {
    /// Reads a source file.
    pub(super) fn parse(text: &'a str) -> Self {
        let tokens = without_tests(&tokens(text));
        let mut source = Self::default();
        // The modules inside the file around a token, and the depth of braces of each.
        let (mut scope, mut depths, mut depth) = (Vec::new(), Vec::new(), 0);
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let rest = &tokens[at..];
            at += 1;
            match (token, rest.get(1), rest.get(2)) {
                (Word("mod"), Some(Word(name)), Some(Mark(';'))) => source.children.push(name),
                (Word("mod"), Some(Word(name)), Some(Mark('{'))) => {
                    scope.push(*name);
                    depths.push(depth);
                }
                (Mark('{'), ..) => depth += 1,
                (Mark('}'), ..) => {
                    depth -= 1;
                    if depths.last() == Some(&depth) {
                        scope.pop();
                        depths.pop();
                    }
                }
                // `impl Trait + use<'a>` declares nothing.
                (Word("use"), after, _) if after != Some(&Mark('<')) => {
                    let end = rest.iter().position(|it| *it == Mark(';')).unwrap_or(rest.len());
                    at += end.saturating_sub(1);
                    source.declare(&scope, &[], &rest[1..end.max(1)]);
                }
                (Word(_), Some(Separator), _) if !is_continued(&tokens, at - 1) => {
                    let path = path_at(rest);
                    at += 2 * path.len() - 2;
                    source.paths.push(Used { scope: scope.clone(), path });
                }
                _ => {}
            }
        }
        source
    }

    /// Declares the names of `tree`, which `use` has after `prefix`.
    fn declare(&mut self, scope: &[&'a str], prefix: &[&'a str], tree: &[Token<'a>]) {
        let mut path = prefix.to_vec();
        let mut rest = tree;
        loop {
            match rest {
                [Word("as"), Word(name), ..] => return self.import(scope, name, path),
                [Word("self")] if !path.is_empty() => break,
                [Word("self"), Word("as"), Word(name)] if !path.is_empty() => {
                    return self.import(scope, name, path);
                }
                [Word(name), after @ ..] => {
                    path.push(name);
                    rest = after;
                }
                [Separator, after @ ..] => rest = after,
                [Mark('{'), inside @ .., Mark('}')] => {
                    let of = |part| self.declare(scope, &path, part);
                    return parts(inside).for_each(of);
                }
                // The names behind `*` are not known: the module itself counts.
                [Mark('*'), ..] => {
                    path.push("*");
                    return self.import(scope, "", path);
                }
                _ => break,
            }
        }
        if let Some(name) = path.last().copied() {
            self.import(scope, name, path);
        }
    }

    fn import(&mut self, scope: &[&'a str], name: &'a str, path: Vec<&'a str>) {
        self.imports.push(Import { scope: scope.to_vec(), name, path });
    }
}

/// The parts of a list, separated by commas outside of its braces.
fn parts<'t, 'a>(list: &'t [Token<'a>]) -> impl Iterator<Item = &'t [Token<'a>]> {
    let mut depth = 0;
    list.split(move |token| {
        depth += i32::from(*token == Mark('{')) - i32::from(*token == Mark('}'));
        depth == 0 && *token == Mark(',')
    })
}

/// True if the word at `at` goes on with a path, or is of one that begins with `::`.
fn is_continued(tokens: &[Token<'_>], at: usize) -> bool {
    at.checked_sub(1).is_some_and(|before| tokens[before] == Separator)
}

/// The names of the path at the beginning of `tokens`.
fn path_at<'a>(tokens: &[Token<'a>]) -> Vec<&'a str> {
    let words = tokens.iter().step_by(2).zip(tokens.iter().skip(1).step_by(2));
    let mut path = Vec::new();
    for (word, after) in words {
        let Word(name) = word else { break };
        path.push(*name);
        if *after != Separator {
            break;
        }
    }
    path
}

/// Drops each item with the attribute `#[cfg(test)]`, or with `all(test, …)`.
fn without_tests<'a>(tokens: &[Token<'a>]) -> Vec<Token<'a>> {
    const OPEN: [Token<'_>; 4] = [Mark('#'), Mark('['), Word("cfg"), Mark('(')];
    let mut kept = Vec::with_capacity(tokens.len());
    let mut rest = tokens;
    while let Some(token) = rest.first() {
        let is_of_tests = rest.strip_prefix(&OPEN).is_some_and(|condition| {
            condition.starts_with(&[Word("test"), Mark(')')])
                || condition.starts_with(&[Word("all"), Mark('('), Word("test")])
        });
        if is_of_tests {
            rest = &rest[item_len(rest)..];
        } else {
            kept.push(*token);
            rest = &rest[1..];
        }
    }
    kept
}

/// The number of tokens of an item, its attributes included.
fn item_len(tokens: &[Token<'_>]) -> usize {
    let is_use = |token: &Token<'_>| *token == Word("use");
    let (mut depth, mut is_import) = (0, false);
    for (index, token) in tokens.iter().enumerate() {
        is_import |= depth == 0 && is_use(token);
        match token {
            Mark('(' | '[' | '{') => depth += 1,
            Mark(close @ (')' | ']' | '}')) => {
                depth -= 1;
                if depth == 0 && *close == '}' && !is_import {
                    return index + 1;
                }
            }
            Mark(';') if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The tokens of a source file, without comments, lifetimes and literals of text.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let len = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            comment_len(rest)
        } else if let Some(len) = literal_len(rest) {
            len
        } else if is_of_word(first) {
            let len = rest.find(|c| !is_of_word(c)).unwrap_or(rest.len());
            tokens.push(Word(&rest[..len]));
            len
        } else if rest.starts_with("::") {
            tokens.push(Separator);
            2
        } else {
            tokens.extend((!first.is_whitespace()).then_some(Mark(first)));
            first.len_utf8()
        };
        rest = &rest[len..];
    }
    tokens
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The length of the block comment at the beginning of `text`, and of those inside it.
fn comment_len(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    loop {
        let rest = &text.as_bytes()[at..];
        match rest {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            [_, ..] => at += 1,
            [] => return at,
        }
        if depth == 0 {
            return at;
        }
    }
}

/// The length of the string, character or lifetime at the beginning of `text`, if there is one.
fn literal_len(text: &str) -> Option<usize> {
    let raw = ["r", "br", "cr"].iter().find_map(|prefix| {
        let rest = text.strip_prefix(prefix)?;
        let hashes = rest.len() - rest.trim_start_matches('#').len();
        let inside = rest[hashes..].strip_prefix('"')?;
        let end = format!("\"{}", "#".repeat(hashes));
        let len = inside.find(&end).map_or(inside.len(), |at| at + end.len());
        Some(text.len() - inside.len() + len)
    });
    let quoted = |prefix: &str, quote: char| {
        let inside = text.strip_prefix(prefix)?.strip_prefix(quote)?;
        Some((text.len() - inside.len(), inside))
    };
    let string = || {
        let (start, inside) = ["", "b", "c"].iter().find_map(|prefix| quoted(prefix, '"'))?;
        Some(start + closed_at(inside, '"'))
    };
    let character = || {
        let (start, inside) = ["", "b"].iter().find_map(|prefix| quoted(prefix, '\''))?;
        let mut chars = inside.chars();
        let first = chars.next()?;
        Some(match (first, chars.next()) {
            ('\\', _) | (_, Some('\'')) => start + closed_at(inside, '\''),
            // A lifetime.
            _ => start + inside.find(|c| !is_of_word(c)).unwrap_or(inside.len()),
        })
    };
    raw.or_else(string).or_else(character)
}

/// The length of `inside` up to and with the first `quote` that is not escaped.
fn closed_at(inside: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in inside.char_indices() {
        if c == quote && !is_escaped {
            return at + 1;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    inside.len()
}
