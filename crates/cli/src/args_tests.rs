//! Tests of the command line's definition.

use clap::{CommandFactory, Parser};

use super::{Args, Command};

#[test]
fn the_definition_is_consistent() {
    Args::command().debug_assert();
}

#[test]
fn global_options_work_before_and_after_the_verb() {
    for line in [
        ["burgeon", "--json", "--state-dir", "/x", "status"],
        ["burgeon", "status", "--json", "--state-dir", "/x"],
        ["burgeon", "--json", "status", "--state-dir", "/x"],
    ] {
        let args = Args::try_parse_from(line).unwrap();
        assert!(args.global.json && args.global.state_dir.is_some());
        assert!(matches!(args.command, Command::Status));
    }
}

#[test]
fn a_computed_image_has_no_source_and_others_need_one() {
    let line = ["burgeon", "build", "--computed", "zeros", "--size", "1G", "z"];
    let Command::Build(build) = Args::try_parse_from(line).unwrap().command else { panic!() };
    assert_eq!((build.source, build.name.as_str(), build.size), (None, "z", Some(1 << 30)));
    assert!(Args::try_parse_from(["burgeon", "build", "z"]).is_err());
    assert!(Args::try_parse_from(["burgeon", "build", "/x", "z"]).is_ok());
}

#[test]
fn contradictions_are_refused() {
    for line in [
        &["burgeon", "mount", "a", "/b", "--read-only", "--writes", "w"][..],
        &["burgeon", "mount", "a", "/b", "--writes-device", "/dev/x", "--reserve"],
        &["burgeon", "mount", "a", "/b", "--thin", "--reserve"],
        &["burgeon", "doctor", "--dry-run"],
        &["burgeon", "umount"],
        &["burgeon", "mount", "a", "/b", "--read-only", "--virtual", "1P"],
        &["burgeon", "map", "/b/c"],
        &["burgeon", "map", "/b/c", "--computed", "zeros"],
        &["burgeon", "map", "/b/c", "--from", "/x", "--computed", "zeros", "--size", "1"],
    ] {
        assert!(Args::try_parse_from(line).is_err(), "{line:?}");
    }
}
