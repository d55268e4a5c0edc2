//! `mount -o remount` of a line of /etc/fstab: changes the attributes of a mount in place.
//!
//! mount(8) joins the options of the line with those of the command, so the options describe all of
//! the mount. Its image and its writes cannot change.

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::protocol::{AccessTimes, AttributesRequest, WritesState};
use rustix::{
    fs::{StatVfsMountFlags, statvfs},
    mount::{MountFlags, mount_remount},
};

use super::{Options, say};
use crate::{
    args,
    commands::{Context, mount_point::Opened, resume::already},
    exit::Busy,
};

pub(super) fn remount(
    context: &Context,
    args: &args::Mount,
    options: &Options,
    fake: bool,
    verbose: bool,
) -> Result<()> {
    let shown = args.path.display();
    let opened = Opened::new(&args.path, None)?;
    let found = already(context, args, &opened).map_err(|e| match e.downcast::<Busy>() {
        Ok(Busy(why)) => Busy(format!("a remount changes nothing but attributes: {why}")).into(),
        Err(e) => e,
    });
    let Some(mount) = found? else {
        let what = format!(
            "cannot remount {shown}: it is not a mount of the state directory {}; name another one \
             with -o state-dir=",
            context.state.root().display()
        );
        return Err(Error::new(ErrorKind::NotFound, what).into());
    };
    let request = args.attributes.request()?;
    let is_writable = matches!(mount.writes(), WritesState::Sprout(_));
    if !is_writable && !request.others.read_only && options.attributes.iter().any(|o| o == "rw") {
        let what = format!(
            "cannot make {shown} writable: it was mounted without a place for writes; unmount it, \
             and mount it again"
        );
        return Err(Busy(what).into());
    }
    let now = statvfs(opened.link())
        .map_err(|e| Error::io(format!("cannot look at {shown}"), e.into()))?;
    let flags = flags(&request, now.f_flag, is_writable);
    say(verbose, || {
        let names: Vec<_> = flags.iter_names().map(|(name, _)| name.to_lowercase()).collect();
        let names = names.join(",").replace("rdonly", "ro");
        format!("remounting {shown} with {names}")
    });
    if fake {
        return Ok(());
    }
    mount_remount(opened.link(), MountFlags::BIND | flags, c"")
        .map_err(|e| Error::io(format!("cannot remount {shown}"), e.into()))?;
    Ok(())
}

/// The kernel's flags for the attributes asked for. Rights of programs and devices stay as they
/// `are`, unless an option names them: by default they depend on the image's origin.
fn flags(request: &AttributesRequest, are: StatVfsMountFlags, is_writable: bool) -> MountFlags {
    let others = &request.others;
    let mut flags = match others.atime {
        AccessTimes::Relatime => MountFlags::RELATIME,
        AccessTimes::Noatime => MountFlags::NOATIME,
        AccessTimes::Strictatime => MountFlags::STRICTATIME,
    };
    let restricted = |asked_for: Option<bool>, restriction| match asked_for {
        Some(allowed) => !allowed,
        None => are.contains(restriction),
    };
    flags.set(MountFlags::NOSUID, restricted(request.suid, StatVfsMountFlags::NOSUID));
    flags.set(MountFlags::NODEV, restricted(request.dev, StatVfsMountFlags::NODEV));
    flags.set(MountFlags::RDONLY, others.read_only || !is_writable);
    flags.set(MountFlags::NOEXEC, others.noexec);
    flags.set(MountFlags::NODIRATIME, others.nodiratime);
    flags.set(MountFlags::NOSYMFOLLOW, others.nosymfollow);
    flags
}

#[cfg(test)]
mod tests {
    use burgeon_daemon::protocol::AttributesRequest;
    use rustix::{fs::StatVfsMountFlags, mount::MountFlags};

    use super::flags;

    #[test]
    fn a_remount_gives_no_rights_that_nobody_asked_for() {
        let mut request = AttributesRequest::default();
        let are = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV;
        let kept = flags(&request, are, true);
        assert_eq!(kept, MountFlags::RELATIME | MountFlags::NOSUID | MountFlags::NODEV);
        request.suid = Some(true);
        request.others.noexec = true;
        let changed = flags(&request, are, false);
        let expected = MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
        assert_eq!(changed, MountFlags::RELATIME | expected);
    }
}
