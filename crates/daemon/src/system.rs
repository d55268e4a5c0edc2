//! Which machine and kernel this is.

/// The kernel's release, such as `6.12.94+deb13-amd64`.
pub(crate) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// This machine's name.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The kernel's version, such as (6, 12); `None` if its name says none.
pub(crate) fn kernel_version() -> Option<(u32, u32)> {
    parse(&kernel_release())
}

fn parse(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn versions_compare_as_numbers() {
        assert_eq!(parse("6.12.94+deb13-amd64"), Some((6, 12)));
        assert_eq!(parse("7.0-rc1"), Some((7, 0)));
        assert_eq!(parse("linux"), None);
        assert!(parse("6.9.1") < parse("6.10.0"));
    }
}
