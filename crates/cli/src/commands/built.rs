//! The report on a finished build.

use burgeon_image::builder::BuildReport;

use crate::output::{bytes, counted};

/// Reports a finished build. `done` is the verb.
pub(super) fn describe(done: &str, shown: &str, report: &BuildReport, stored: u64, seconds: f64) {
    let image = &report.image;
    println!(
        "{done} {shown} in {seconds:.1} s: {}, {} of data, stored in {}",
        counted(image.inodes, "file"),
        bytes(image.file_bytes),
        bytes(stored)
    );
    if report.reused_bytes > 0 {
        println!("{} of that were in the store already", bytes(report.reused_bytes));
    }
    for path in &report.changed {
        println!("warning: {} changed while it was read", path.display());
    }
    if report.acls_left_out > 0 {
        println!(
            "warning: left out the ACLs of {}: they name users or groups without their \
             numbers, or are no POSIX ACLs; `tar --xattrs --xattrs-include='*'` keeps the numbers",
            counted(report.acls_left_out, "file")
        );
    }
    for path in &report.mounts_left_out {
        println!("note: left out the file systems mounted at {}", path.display());
    }
}
