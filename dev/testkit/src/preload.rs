//! Libraries in C that change calls of a program under test.

use std::{ffi::OsString, fs, process::Command};

use crate::Space;

/// Compiles `source` in the folder of `space`, and returns the environment with which a program
/// loads it.
#[track_caller]
pub fn preload(space: &Space, source: &str) -> [(&'static str, OsString); 2] {
    const NAME: &str = "preloaded.so";
    let (folder, text) = (space.make_folder("preloaded"), space.path("preloaded.c"));
    fs::write(&text, source).expect("a test can write to its folder");
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-o"]).arg(folder.join(NAME)).arg(text);
    assert!(compile.status().is_ok_and(|status| status.success()), "{compile:?}");
    // The loader takes the path of a library apart at spaces, and that of a folder not.
    [("LD_LIBRARY_PATH", folder.into()), ("LD_PRELOAD", NAME.into())]
}
