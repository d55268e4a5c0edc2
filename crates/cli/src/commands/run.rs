//! `burgeon run`: mounts an image, runs its program in namespaces of its own, and unmounts.
//!
//! The mount is made in a mount namespace of this command alone, on a directory of a tmpfs there.
//! So the end of the command, also by `kill -9`, ends the mount; nothing else on this host sees it,
//! or could keep it.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt,
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Result;
use burgeon_block::Error;
use burgeon_container::{ContainerOptions, run};
use burgeon_daemon::Client;
use rustix::mount::{MountFlags, mount};

use super::{Context, bundle::need_oci_image, mount, need_mount_privilege, umount};
use crate::{container_args::Run, exit};

pub(super) fn run(context: &Context, args: &Run) -> Result<ExitCode> {
    need_mount_privilege("run")?;
    need_oci_image(&args.image)?;
    // It outlives this command, so it must not be in this command's namespace.
    Client::connect_or_start(&context.state)?;
    run::leave_mount_namespace()?;
    let point = make_point(context)?;
    let choices = &args.choices;
    let (_, target) = mount::place(context, choices.mount(context, &args.image, &point))?;
    let code = choices.process(context, &args.image, &target).and_then(|(settings, process)| {
        let options = ContainerOptions {
            network: args.network.into(),
            read_only: choices.read_only,
            terminal: false,
            hostname: choices.hostname.clone(),
        };
        Ok(run::run(process, &settings, options, &target)?)
    });
    // The program's end counts. Its mount ends with this command in any case.
    if let Err(e) = umount::one(context, &target) {
        exit::say(&e);
    }
    Ok(ExitCode::from(code?))
}

/// Makes an empty directory that only this mount namespace has.
fn make_point(context: &Context) -> Result<PathBuf> {
    let folder = context.state.root().join("containers");
    let failed = |e| Error::io(format!("cannot make a place in {}", folder.display()), e);
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(e).into()),
        _ => {}
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("burgeon", &folder, "tmpfs", flags, Some(c"mode=700,size=64k"))
        .map_err(|errno| failed(errno.into()))?;
    let point = folder.join(std::process::id().to_string());
    fs::create_dir(&point).map_err(failed)?;
    Ok(point)
}
