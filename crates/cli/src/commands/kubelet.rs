//! The process `burgeon __kubelet-login`: an image on its standard input, and what kubelet's
//! credential provider plugins print for it on its standard output.

use std::{
    io::{Read, stdin},
    process::ExitCode,
};

use burgeon_source::registry::ask_plugins;

/// The longest name of an image, in bytes.
const IMAGE_MAX: u64 = 4096;

pub(crate) fn process() -> ExitCode {
    let mut image = String::new();
    match stdin().take(IMAGE_MAX).read_to_string(&mut image) {
        Ok(_) => {
            println!("{}", ask_plugins(&image));
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}
