//! Converts textual ACLs in archives to the xattrs that Linux stores ACLs in.
//!
//! ```text
//!   SCHILY.acl.access, SCHILY.acl.default:   user::rw-,user:lisa:rwx:502,group::r--,mask::rwx,…
//!                                            entries end in a comma or newline; 502 is lisa's
//!   system.posix_acl_access, …_default:      version u32 = 2, { tag u16, rights u16, id u32 } …
//!                                            little-endian, in the order of tags and ids
//! ```
//!
//! Users and groups are identified by number: the number in the text, or a name that is itself a
//! number. A name from another machine means nothing on this host, and granting rights to the
//! wrong user is worse than granting none: such a list is left out and counted, as is any list
//! that is not exactly of this form.

/// Tags of entries, `linux/posix_acl.h`.
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// The id of entries without a user or group.
const NOBODY: u32 = u32::MAX;

/// `POSIX_ACL_XATTR_VERSION`.
const VERSION: u32 = 2;

/// A list in Linux's form.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Acl {
    /// Fully expressed by the mode bits: no xattr is stored.
    Minimal,
    /// The xattr's value.
    Value(Vec<u8>),
}

/// Translates a list; `None` if that is impossible.
pub(super) fn translate(text: &[u8]) -> Option<Acl> {
    let text = std::str::from_utf8(text).ok()?;
    let entries = text.split([',', '\n']).map(|entry| {
        // GNU tar may append the effective rights under the mask.
        entry.split('#').next().unwrap_or_default().trim()
    });
    let entries = entries.filter(|entry| !entry.is_empty());
    let mut entries = entries.map(entry).collect::<Option<Vec<_>>>()?;
    entries.sort_unstable();
    let count = |tag: u16| entries.iter().filter(|entry| entry.0 == tag).count();
    let named = count(USER) + count(GROUP);
    let is_whole = [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|tag| count(*tag) == 1)
        && (count(MASK) == 1 || (count(MASK) == 0 && named == 0))
        && entries.is_sorted_by(|a, b| (a.0, a.1) < (b.0, b.1));
    if !is_whole {
        return None;
    }
    if entries.len() == 3 {
        return Some(Acl::Minimal);
    }
    let mut value = VERSION.to_le_bytes().to_vec();
    for (tag, id, rights) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(rights.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    Some(Acl::Value(value))
}

/// Tag, id and rights.
fn entry(text: &str) -> Option<(u16, u32, u16)> {
    let fields: Vec<_> = text.split(':').collect();
    let (kind, who, rights, number) = match *fields.as_slice() {
        // `mask` and `other` are also written without their empty field.
        [kind @ ("mask" | "m" | "other" | "o"), rights] => (kind, "", rights, None),
        [kind, who, rights] => (kind, who, rights, None),
        [kind, who, rights, number] if !who.is_empty() => (kind, who, rights, Some(number)),
        _ => return None,
    };
    let tag = match (kind, who.is_empty()) {
        ("user" | "u", true) => USER_OBJ,
        ("user" | "u", false) => USER,
        ("group" | "g", true) => GROUP_OBJ,
        ("group" | "g", false) => GROUP,
        ("mask" | "m", true) => MASK,
        ("other" | "o", true) => OTHER,
        _ => return None,
    };
    let id = match who.is_empty() {
        true => NOBODY,
        false => id(number.unwrap_or(who))?,
    };
    Some((tag, id, self::rights(rights)?))
}

fn id(text: &str) -> Option<u32> {
    let is_number = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    text.parse().ok().filter(|id| is_number && *id != NOBODY)
}

fn rights(text: &str) -> Option<u16> {
    let [r, w, x] = text.as_bytes() else { return None };
    let bit = |c: u8, letter: u8, value: u16| match c {
        b'-' => Some(0),
        c if c == letter => Some(value),
        _ => None,
    };
    Some(bit(*r, b'r', 4)? | bit(*w, b'w', 2)? | bit(*x, b'x', 1)?)
}

#[cfg(test)]
mod tests {
    use super::{Acl, translate};

    fn value(entries: &[(u16, u16, u32)]) -> Option<Acl> {
        let mut bytes = 2u32.to_le_bytes().to_vec();
        for (tag, rights, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(rights.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        Some(Acl::Value(bytes))
    }

    #[test]
    fn the_forms_of_several_tars_give_one_list() {
        const ANY: u32 = u32::MAX;
        let expected = value(&[
            (0x01, 6, ANY),
            (0x02, 5, 7),
            (0x02, 7, 502),
            (0x04, 4, ANY),
            (0x08, 0, 12),
            (0x10, 7, ANY),
            (0x20, 0, ANY),
        ]);
        for text in [
            "user::rw-,user:lisa:rwx:502,user:7:r-x,group::r--,group:12:---,mask::rwx,other::---",
            "user::rw-\nuser:502:rwx\t#effective:rwx\nuser:7:r-x\ngroup::r--\ngroup:12:---\n\
             mask::rwx\nother::---\n",
            "o:---,m:rwx,g:12:---,g::r--,u:7:r-x,u:502:rwx,u::rw-",
        ] {
            assert_eq!(translate(text.as_bytes()), expected, "{text}");
        }
        assert_eq!(translate(b"user::rw-,group::r--,other::r--"), Some(Acl::Minimal));
        let masked = translate(b"user::rw-,group::r--,mask::r--,other::r--");
        assert!(matches!(masked, Some(Acl::Value(value)) if value.len() == 4 + 4 * 8));
    }

    #[test]
    fn malformed_lists_are_refused() {
        for text in [
            &b""[..],
            b"user::rw-",
            b"user::rw-,group::r--,other::r--,other::r--",
            b"user::rw-,user:lisa:rwx,group::r--,mask::rwx,other::r--",
            b"user::rw-,user:502:rwx,group::r--,other::r--",
            b"user::rw-,user:5:rwx,user:5:r--,group::r--,mask::rwx,other::r--",
            b"user::rw-,user:4294967295:rwx,group::r--,mask::rwx,other::r--",
            b"user::rw-,user:+5:rwx,group::r--,mask::rwx,other::r--",
            b"user::rwz,group::r--,other::r--",
            b"user::rw,group::r--,other::r--",
            b"user::rw-:5,group::r--,other::r--",
            b"user::rw-,group::r--,mask:5:rwx,other::r--",
            b"default:user::rw-,group::r--,other::r--",
            b"user::rw-,group::r--,other::r--,\xff",
            b"owner@:rw-p--aARWcCos:-------:allow",
        ] {
            assert_eq!(translate(text), None, "{}", text.escape_ascii());
        }
    }
}
