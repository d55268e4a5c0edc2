//! Masks secrets in text that leaves the host, or that users show to others: reports for support,
//! and errors, which name what was typed.

/// Stands for what was left out.
const MASK: &str = "[redacted]";

/// Words whose value is a secret.
const SECRET: [&str; 12] = [
    "authorization",
    "password",
    "passwd",
    "secret",
    "token",
    "signature",
    "credential",
    "access_key",
    "access-key",
    "accesskey",
    "api_key",
    "apikey",
];

/// `text` without what looks like a secret: users and queries of URLs, and values of words of
/// [`SECRET`].
pub(crate) fn text(text: &str) -> String {
    // A masked value may join two words to a URL: those are masked once more.
    let mask = |line: &str| urls(&without_values(&urls(line)));
    // Not by `lines`: an empty last line would be lost, each time another one.
    let lines: Vec<_> = text.split('\n').map(mask).collect();
    lines.join("\n")
}

/// A line without users, queries and fragments of URLs, which may be or hold secrets.
pub(crate) fn urls(line: &str) -> String {
    let ends = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '<' | '>' | '`');
    let words = line.split_inclusive(ends).map(|word| {
        let text = word.trim_end_matches(ends);
        let Some(start) = text.find("://") else { return word.to_owned() };
        // A sentence may end in the mark.
        let (url, query) = match text[start..].find(['?', '#']).map(|at| text.split_at(start + at))
        {
            Some((url, rest)) if rest.len() > 1 => (url, format!("{}{MASK}", &rest[..1])),
            _ => (text, String::new()),
        };
        without_users(url) + &query + &word[text.len()..]
    });
    words.collect()
}

/// Masks what is before `@` behind each `://`, up to a slash.
fn without_users(url: &str) -> String {
    let mut parts = url.split("://");
    let mut done = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        done.push_str("://");
        let authority = part.find('/').unwrap_or(part.len());
        let at = part[..authority].rfind('@').filter(|at| *at > 0);
        if at.is_some() {
            done.push_str(MASK);
        }
        done.push_str(&part[at.unwrap_or(0)..]);
    }
    done
}

/// Masks what follows `=` or `:` behind a word that names a secret.
fn without_values(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let mut done = String::new();
    let mut from = 0;
    while let Some((at, word)) = next_secret(&lower, from) {
        let mut value = at + word.len();
        // The rest of the word, as in "secrets_key".
        let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        value += lower[value..].find(|c| !in_word(c)).unwrap_or(lower.len() - value);
        let behind = &line[value..];
        let inner = behind.trim_start_matches([' ', '"', '\'']);
        let Some(inner) = inner.strip_prefix([':', '=']) else {
            done.push_str(&line[from..value]);
            from = value;
            continue;
        };
        let inner = inner.trim_start_matches([' ', '"', '\'']);
        let begin = line.len() - inner.len();
        let stops: &[char] = if word == "authorization" {
            &['"', '\'']
        } else {
            &['"', '\'', ' ', ',', '&', ';', '}']
        };
        let end = begin + inner.find(stops).unwrap_or(inner.len());
        done.push_str(&line[from..begin]);
        done.push_str(if end > begin { MASK } else { "" });
        from = end;
    }
    done + &line[from..]
}

fn next_secret(lower: &str, from: usize) -> Option<(usize, &'static str)> {
    let places = SECRET.iter().filter_map(|word| Some((from + lower[from..].find(word)?, *word)));
    places.min_by_key(|(at, word)| (*at, usize::MAX - word.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{MASK, text};

    #[test]
    fn texts_like_secrets_are_masked() {
        for (given, masked) in [
            ("s3://key:pw@host/b?X-Sig=1 x", "s3://[redacted]@host/b?[redacted] x"),
            ("https://host/a@b", "https://host/a@b"),
            ("https://h/x#abc is it s3://b?", "https://h/x#[redacted] is it s3://b?"),
            ("Authorization: Bearer abc def", "Authorization: [redacted]"),
            (r#"{"token": "abc", "n": 1}"#, r#"{"token": "[redacted]", "n": 1}"#),
            ("AWS_SECRET_ACCESS_KEY=abc/d x", "AWS_SECRET_ACCESS_KEY=[redacted] x"),
            ("password='a' secret = b", "password='[redacted]' secret = [redacted]"),
            ("the token was refused", "the token was refused"),
            ("tokens: ", "tokens: "),
            ("https://token:abc@host/a", "https://[redacted]@host/a"),
            ("://token://<}@", "://[redacted]@"),
        ] {
            assert_eq!(text(given), masked, "{given}");
        }
        assert_eq!(text("é token=é\nb"), format!("é token={MASK}\nb"));
        assert_eq!(text("a\n\n"), "a\n\n");
    }

    proptest! {
        #[test]
        fn no_text_panics_and_none_is_masked_twice(
            given in "((token|secret|://|@|[?#=: \"'\n])|\\PC){0,20}"
        ) {
            let once = text(&given);
            prop_assert_eq!(text(&once), once.clone());
        }
    }
}
