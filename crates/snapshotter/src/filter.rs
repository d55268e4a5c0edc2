//! The filters of `List`, in containerd's grammar.
//!
//! ```text
//!   filter   := selector ("," selector)*          all must match; of several filters, one
//!   selector := path [operator value]             without an operator: the field is there
//!   path     := field ("." field)*                kind, name, parent, labels.KEY
//!   field    := quoted | [A-Za-z0-9_]+
//!   operator := "==" | "!=" | "~="                equal, not equal, a regular expression finds
//!   value    := quoted | [^\s,]+
//!   quoted   := a string of Go, in " or '; after ~= also in / or |, where only the delimiter is escaped
//! ```
//!
//! Every input is bounded; regular expressions run in linear time. Tested below and by the fuzz
//! target `snapshotter`.

use regex::{Regex, RegexBuilder};

use crate::model::{Refusal, Snapshot};

/// Most filters of a call.
const FILTERS_MAX: usize = 256;
/// The longest filter, in bytes.
const FILTER_MAX: usize = 16 << 10;
/// The largest compiled expression, in bytes.
const REGEX_BYTES: usize = 1 << 20;

/// The snapshots to list.
#[derive(Debug, Default)]
pub struct Filter {
    any: Vec<Vec<Selector>>,
}

#[derive(Debug)]
struct Selector {
    path: Vec<String>,
    test: Test,
}

#[derive(Debug)]
enum Test {
    Present,
    Equal(String),
    NotEqual(String),
    Finds(Regex),
}

impl Filter {
    /// Parses filters of which one has to match; none match everything.
    pub fn parse(filters: &[String]) -> Result<Self, Refusal> {
        if filters.len() > FILTERS_MAX {
            let what = format!("{} filters are more than {FILTERS_MAX}", filters.len());
            return Err(Refusal::Invalid(what));
        }
        let any = filters.iter().map(|filter| parse_one(filter)).collect::<Result<_, _>>()?;
        Ok(Self { any })
    }

    /// True if the snapshot is to be listed.
    pub fn matches(&self, snapshot: &Snapshot) -> bool {
        let all = |all: &Vec<Selector>| all.iter().all(|selector| selector.matches(snapshot));
        self.any.is_empty() || self.any.iter().any(all)
    }
}

impl Selector {
    fn matches(&self, snapshot: &Snapshot) -> bool {
        let (head, rest) = match self.path.split_first() {
            Some((head, rest)) => (head.as_str(), rest.join(".")),
            None => return false,
        };
        let value = match head {
            "kind" => Some(snapshot.kind.name()),
            "name" => Some(snapshot.name.as_str()),
            "parent" => Some(snapshot.parent.as_deref().unwrap_or_default()),
            "labels" => snapshot.labels.get(&rest).map(String::as_str),
            _ => None,
        };
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(wanted) => value == Some(wanted),
            Test::NotEqual(wanted) => value.unwrap_or_default() != wanted,
            Test::Finds(regex) => value.is_some_and(|value| regex.is_match(value)),
        }
    }
}

fn parse_one(text: &str) -> Result<Vec<Selector>, Refusal> {
    if text.len() > FILTER_MAX {
        let what = format!("a filter of {} bytes is longer than {FILTER_MAX}", text.len());
        return Err(Refusal::Invalid(what));
    }
    let mut rest = Rest { text, at: 0 };
    let mut all = Vec::new();
    while !text.is_empty() {
        all.push(rest.selector()?);
        if rest.at == text.len() {
            break;
        }
        rest.expect(",")?;
    }
    Ok(all)
}

/// The unparsed rest of a filter.
struct Rest<'a> {
    text: &'a str,
    at: usize,
}

impl Rest<'_> {
    fn left(&self) -> &str {
        &self.text[self.at..]
    }

    fn wrong(&self, what: &str) -> Refusal {
        Refusal::Invalid(format!("filter {:?}: {what} at byte {}", self.text, self.at))
    }

    fn take(&mut self, text: &str) -> bool {
        let is_next = self.left().starts_with(text);
        self.at += if is_next { text.len() } else { 0 };
        is_next
    }

    fn expect(&mut self, text: &str) -> Result<(), Refusal> {
        match self.take(text) {
            true => Ok(()),
            false => Err(self.wrong(&format!("there should be {text:?}"))),
        }
    }

    /// The characters from here that `is_part`.
    fn run(&mut self, is_part: impl Fn(char) -> bool) -> Result<String, Refusal> {
        let end = self.left().find(|c| !is_part(c)).unwrap_or(self.left().len());
        if end == 0 {
            return Err(self.wrong("a field or value is missing"));
        }
        let run = self.left()[..end].to_owned();
        self.at += end;
        Ok(run)
    }

    fn selector(&mut self) -> Result<Selector, Refusal> {
        let mut path = vec![self.field()?];
        while self.take(".") {
            path.push(self.field()?);
        }
        let test = if self.take("==") {
            Test::Equal(self.value("\"'")?)
        } else if self.take("!=") {
            Test::NotEqual(self.value("\"'")?)
        } else if self.take("~=") {
            let pattern = self.value("\"'/|")?;
            let regex = RegexBuilder::new(&pattern).size_limit(REGEX_BYTES).build();
            Test::Finds(regex.map_err(|e| self.wrong(&e.to_string()))?)
        } else {
            Test::Present
        };
        Ok(Selector { path, test })
    }

    fn field(&mut self) -> Result<String, Refusal> {
        match self.left().chars().next() {
            Some(quote @ ('"' | '\'')) => self.quoted(quote),
            _ => self.run(|c| c.is_ascii_alphanumeric() || c == '_'),
        }
    }

    fn value(&mut self, quotes: &str) -> Result<String, Refusal> {
        match self.left().chars().next() {
            Some(quote) if quotes.contains(quote) => self.quoted(quote),
            _ => self.run(|c| !c.is_whitespace() && c != ','),
        }
    }

    fn quoted(&mut self, quote: char) -> Result<String, Refusal> {
        self.at += quote.len_utf8();
        let is_raw = matches!(quote, '/' | '|');
        // Bytes, because \x and octal escapes name bytes.
        let mut out = Vec::new();
        loop {
            let next = self.left().chars().next();
            let c = next.ok_or_else(|| self.wrong("a quote does not end"))?;
            self.at += c.len_utf8();
            if c == quote {
                let text = String::from_utf8(out);
                return text.map_err(|_| self.wrong("a quote is not UTF-8"));
            }
            if c != '\\' {
                out.extend(c.encode_utf8(&mut [0; 4]).as_bytes());
            } else if !is_raw {
                self.escape(quote, &mut out)?;
            } else if !self.take(quote.encode_utf8(&mut [0; 4])) {
                out.push(b'\\');
            } else {
                out.extend(quote.encode_utf8(&mut [0; 4]).as_bytes());
            }
        }
    }

    /// The escape whose backslash was read.
    fn escape(&mut self, quote: char, out: &mut Vec<u8>) -> Result<(), Refusal> {
        let c = self.left().chars().next().ok_or_else(|| self.wrong("a quote does not end"))?;
        let digits = match c {
            'x' => Some((1, 2, 16)),
            'u' => Some((1, 4, 16)),
            'U' => Some((1, 8, 16)),
            '0'..='7' => Some((0, 3, 8)),
            _ => None,
        };
        if let Some((skip, count, radix)) = digits {
            let digits = self
                .left()
                .get(skip..skip + count)
                .filter(|digits| digits.bytes().all(|digit| char::from(digit).is_digit(radix)));
            let value = digits.and_then(|digits| u32::from_str_radix(digits, radix).ok());
            let value = value.ok_or_else(|| self.wrong("an escape lacks digits"))?;
            self.at += skip + count;
            if matches!(c, 'u' | 'U') {
                let c = char::from_u32(value).ok_or_else(|| self.wrong("no character"))?;
                out.extend(c.encode_utf8(&mut [0; 4]).as_bytes());
            } else {
                out.push(u8::try_from(value).map_err(|_| self.wrong("no byte"))?);
            }
            return Ok(());
        }
        out.push(match c {
            'a' => 7,
            'b' => 8,
            'f' => 12,
            'n' => b'\n',
            'r' => b'\r',
            't' => b'\t',
            'v' => 11,
            '\\' => b'\\',
            '"' | '\'' if c == quote => c as u8,
            _ => return Err(self.wrong("an unknown escape")),
        });
        self.at += c.len_utf8();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::Filter;
    use crate::model::{Labels, Snapshot, SnapshotKind};

    fn snapshot() -> Snapshot {
        let labels = [("containerd.io/snapshot.ref", "sha256:ab"), ("foo", "b a,r"), ("e", "")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Snapshot {
            id: 1,
            name: "default/3/a".into(),
            parent: Some("p".into()),
            kind: SnapshotKind::Committed,
            labels: Labels::from(labels),
            created: SystemTime::UNIX_EPOCH,
            updated: SystemTime::UNIX_EPOCH,
            usage: None,
            remote: None,
            why_local: None,
            native: None,
            why_overlay: None,
        }
    }

    fn matches(filters: &[&str]) -> Option<bool> {
        let filters: Vec<_> = filters.iter().map(|filter| (*filter).to_owned()).collect();
        Filter::parse(&filters).ok().map(|filter| filter.matches(&snapshot()))
    }

    #[test]
    fn filters_match_as_in_containerd() {
        let yes: &[&[&str]] = &[
            &[],
            &[""],
            &["kind==committed"],
            &["kind==active", "parent==p"],
            &["labels.\"containerd.io/snapshot.ref\"==sha256:ab,parent==p"],
            &["labels.'containerd.io/snapshot.ref'"],
            &["labels.containerd.io", "name~=/^default\\//"],
            &["name~=|a$|", "kind==x"],
            &["labels.foo==\"b a,r\""],
            &["labels.foo==\"b\\x20a\\u002cr\""],
            &["labels.foo~='^b'"],
            &["labels.e"],
            &["labels.none!=x"],
            &["kind!=active"],
        ];
        for filters in yes {
            assert_eq!(matches(filters), Some(true), "{filters:?}");
        }
        let no: &[&[&str]] = &[
            &["kind==active"],
            &["kind==committed,parent==q"],
            &["labels.none"],
            &["labels.none==x"],
            &["labels.none~=."],
            &["size==1"],
            &["parent!=p"],
        ];
        for filters in no {
            assert_eq!(matches(filters), Some(false), "{filters:?}");
        }
    }

    #[test]
    fn wrong_filters_are_refused() {
        let wrong = [
            "kind=",
            "kind==",
            "==a",
            "kind==a,",
            ",",
            "kind==a b",
            "kind==\"a",
            "kind ==a",
            "a..b",
            "kind~=(",
            "kind==\"\\q\"",
            "kind==\"\\xg0\"",
            "kind==/a b/",
            "kind==\"\\777\"",
            "kind~=(a{1000}){1000}",
            "é==a",
        ];
        for filter in wrong {
            assert_eq!(matches(&[filter]), None, "{filter}");
        }
        assert_eq!(matches(&[&"a".repeat(super::FILTER_MAX + 1)]), None);
        assert_eq!(matches(&vec!["a"; super::FILTERS_MAX + 1]), None);
    }
}
