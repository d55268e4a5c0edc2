//! `burgeon mount`: the daemon makes a detached mount, and this process moves it into place in its
//! own mount namespace.

use std::{
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::Instant,
};

use anyhow::{Result, anyhow};
use burgeon_block::Error;
use burgeon_daemon::{
    Client,
    protocol::{
        AttributesRequest, MountAttributes, MountRequest, Mounted, ProfileRequest, Reply, Request,
        SproutRequest, WritesRequest, WritesState,
    },
    writes,
};
use burgeon_image::catalog::EMPTY_IMAGE;
use burgeon_oci::ImageForm;
use burgeon_source::Location;
use serde_json::json;

use super::{
    Context, far, images, let_go, mistakes, mount_defaults, mount_point::Opened, named,
    need_mount_privilege, oci_image, persist, resume::resume, taken,
};
use crate::{args, attributes::Attributes, output, pull::Pull, transport::Transport};

pub(super) fn mount(context: &Context, mut args: args::Mount) -> Result<ExitCode> {
    need_mount_privilege("mount")?;
    mount_defaults::apply(context, &mut args);
    let plan = args.persist.then(|| persist::Plan::new(context, &args)).transpose()?;
    let mut document = match &plan {
        Some(plan) if plan.is_mounted => {
            if !context.json {
                println!("{} is mounted already", output::path(&plan.target));
            }
            json!({ "target": plan.target, "mounted_before": true })
        }
        Some(plan) => {
            // Before the mount: systemd may take a new mount for one whose device has gone, if it
            // reads its units again at that moment.
            let made = plan.install().and_then(|()| make(context, args));
            made.inspect_err(|_| plan.undo())?
        }
        None => make(context, args)?,
    };
    if let Some(plan) = plan {
        plan.install()?;
        document["unit"] = json!(plan.unit_name());
        if !context.json {
            println!("{} mounts it at each boot", plan.unit_name());
        }
    }
    if context.json {
        output::print_json(&document)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Mounts, or serves a mount again that is in place; prints the result for people, and returns it
/// for programs.
fn make(context: &Context, args: args::Mount) -> Result<serde_json::Value> {
    let begun = Instant::now();
    let wanted = args.attributes.request()?;
    if let Some((status, target)) = resume(context, &args)? {
        let ms = begun.elapsed().as_millis() as u64;
        if !context.json {
            let (shown, transport) = (output::path(&target), &status.transport);
            println!(
                "resumed {shown} in {ms} ms: it was in place, and is served again over {transport}"
            );
        }
        return Ok(json!({ "mount": status, "target": target, "ms": ms, "resumed": true }));
    }
    let is_let_go = args.let_go;
    let (mounted, target) = place(context, args)?;
    let ms = begun.elapsed().as_millis() as u64;
    if !context.json {
        describe(&mounted, &target, ms, wanted);
    }
    if is_let_go {
        let gone = let_go::of_mount(context, &target)?;
        if context.json {
            let let_go = gone.to_json(&target);
            return Ok(json!({ "mount": mounted, "target": target, "ms": ms, "let_go": let_go }));
        }
        gone.describe(&target);
    }
    Ok(json!({ "mount": mounted, "target": target, "ms": ms }))
}

/// Mounts nothing but a virtual area.
pub(super) fn create_empty(context: &Context, args: args::CreateEmpty) -> Result<ExitCode> {
    need_mount_privilege("create-empty")?;
    match named::trusted(context, &context.open_store()?, EMPTY_IMAGE) {
        Ok(_) => {}
        // It is missing, or belongs to another user.
        Err(_) => {
            let folder = context.state.run().join(format!("empty-{}", std::process::id()));
            let failed = |e| Error::io(format!("cannot make {}", folder.display()), e);
            fs::DirBuilder::new().mode(0o755).create(&folder).map_err(failed)?;
            let built = images::build_quietly(context, &folder, EMPTY_IMAGE);
            fs::remove_dir(&folder).map_err(failed)?;
            built?;
        }
    }
    let args::CreateEmpty { path, writes, virtual_size, write_limit, reserve, fetch_limit } = args;
    // Existing writes have their size; the daemon reports any damage to them.
    let are_new = matches!(writes::find(&context.state, &writes), Ok(None));
    let virtual_size = virtual_size.or(are_new.then_some(args::VIRTUAL_DEFAULT_BYTES));
    mount(
        context,
        args::Mount {
            name: EMPTY_IMAGE.to_owned(),
            index: None,
            checked: false,
            pull: Some(Pull::default()),
            path,
            writes: Some(writes),
            read_only: false,
            write_limit,
            reserve,
            thin: false,
            writes_device: None,
            fill: Some(false),
            let_go: false,
            profile: Some("none".to_owned()),
            transport: None,
            fast: false,
            persist: false,
            virtual_size,
            fetch_limit,
            attributes: Attributes::default(),
        },
    )
}

/// Mounts without output.
pub(crate) fn place(context: &Context, args: args::Mount) -> Result<(Mounted, PathBuf)> {
    need_mount_privilege("mount")?;
    let opened = Opened::new(&args.path, None).map_err(|e| {
        // Asked about only now: the question would set off an automount.
        match !args.path.exists() && Path::new(&args.name).is_dir() {
            true => mistakes::swapped("mount", &args.path.to_string_lossy(), &args.name).into(),
            false => e,
        }
    })?;
    place_at(context, args, opened)
}

/// Mounts at `opened`, the directory at the path in `args`.
pub(crate) fn place_at(
    context: &Context,
    args: args::Mount,
    opened: Opened,
) -> Result<(Mounted, PathBuf)> {
    let point = opened.take()?;
    let target = point.path()?;
    let mut attributes = args.attributes.request()?;
    attributes.others.read_only |= args.read_only;
    let name = args.writes.clone();
    let writes = writes_of(&args, attributes.others.read_only)?;
    // Also checked here: the daemon may not see mounts of this namespace.
    if let Some(folder) = context.store.as_ref().and_then(Location::folder) {
        burgeon_daemon::refuse_burgeon(folder, "the store")?;
    }
    let want = match args.index.as_deref() {
        Some(digest) => ImageForm::Index(digest),
        None if args.checked => ImageForm::Checked,
        None => ImageForm::Any,
    };
    let found = thread::scope(|scope| {
        // Start the daemon meanwhile: finding an image may take round trips. Errors here recur
        // below.
        scope.spawn(|| Client::connect_or_start(&context.state).map(drop));
        oci_image::find(context, args.name, want, args.pull.unwrap_or_default().into())
    })?;
    let is_own = context.store.is_none() && found.store == context.store_location();
    let request = MountRequest {
        digest: found.digest()?.map(Into::into),
        image: found.name.clone(),
        shown: Some(found.shown.clone()),
        store: (!is_own).then(|| found.store.clone()),
        store_identity: context.store_identity(),
        store_away: found.store_away,
        access: found.access.clone(),
        writes,
        fill: args.fill.unwrap_or_default(),
        transport: args.transport.unwrap_or(Transport::Auto).into(),
        fast: args.fast,
        target: target.clone(),
        virtual_bytes: args.virtual_size.unwrap_or(0),
        fetch_limit: args.fetch_limit,
        profile: profile_of(args.profile.as_deref())?,
        attributes,
    };
    let asked =
        (found.store == context.store_location() && !found.store_away).then(|| found.name.clone());
    let client = Client::connect_or_start(&context.state)?;
    let request = Request::Mount(Box::new(request));
    let made = taken::call_when_released(context, &client, &request, name.as_deref());
    let (reply, mut fds) = made.map_err(|e| {
        let e = found.explain(e);
        match name {
            Some(name) => taken::explain_writes(context, &name, ", or take another name", e),
            None => e,
        }
    })?;
    let (Reply::Mounted(mounted), Some(mount)) = (reply, fds.pop()) else {
        return Err(anyhow!(
            "unexpected answer from the daemon: is it of another version? `burgeon upgrade` replaces it"
        ));
    };
    if let Some(name) = asked {
        far::remember(context, &name, &mounted.digest.0);
    }
    let target = point.attach(mount)?;
    // Only `status` uses the path, and the mount is in use already.
    let _ = client.call(&Request::Placed { id: mounted.id, target: target.clone() });
    Ok((mounted, target))
}

/// The place for the writes of the mount.
fn writes_of(args: &args::Mount, is_read_only: bool) -> Result<WritesRequest> {
    let has_own_writes = args.writes.is_some() || args.writes_device.is_some();
    // Read-only writes need no space.
    if args.read_only || is_read_only && !has_own_writes {
        return Ok(WritesRequest::ReadOnly);
    }
    Ok(WritesRequest::Kept(SproutRequest {
        name: args.writes.clone(),
        limit: args.write_limit,
        thin: !args.reserve.unwrap_or_default(),
        device: args.writes_device.as_ref().map(std::path::absolute).transpose()?,
    }))
}

fn profile_of(typed: Option<&str>) -> Result<ProfileRequest> {
    Ok(match typed {
        Some("none") => ProfileRequest::None,
        None | Some("auto") => ProfileRequest::Auto,
        Some(path) => ProfileRequest::File(std::path::absolute(path)?),
    })
}

/// Prints the properties of a mount that has just been made.
pub(crate) fn describe(mounted: &Mounted, target: &Path, ms: u64, wanted: AttributesRequest) {
    println!(
        "mounted {} in {ms} ms: {} over {}, {} of metadata",
        output::path(target),
        mounted.transport,
        mounted.device.display(),
        output::bytes(mounted.metadata_bytes)
    );
    println!("{}", describe_writes(&mounted.writes));
    println!("{}", describe_attributes(&mounted.attributes, wanted));
    for note in &mounted.notes {
        println!("note: {note}");
    }
}

/// The attributes of the mount, and the reason for those that nobody asked for.
fn describe_attributes(attributes: &MountAttributes, wanted: AttributesRequest) -> String {
    let by_default = |wanted: Option<bool>, has: bool| wanted.is_none() && !has;
    if by_default(wanted.suid, attributes.suid) || by_default(wanted.dev, attributes.dev) {
        return format!(
            "mounted {attributes}: this host has not built the image from its own files; --suid and \
             --dev let its programs and devices work"
        );
    }
    format!("mounted {attributes}")
}

/// The destination of writes, as a sentence.
fn describe_writes(writes: &WritesState) -> String {
    let WritesState::Sprout(sprout) = writes else { return "read-only".to_owned() };
    let room = match sprout.thin {
        false => format!("{} reserved", output::bytes(sprout.limit)),
        true => format!(
            "up to {}, {} reserved so far",
            output::bytes(sprout.limit),
            output::bytes(sprout.reserved)
        ),
    };
    match &sprout.name {
        Some(name) => format!("writes are kept as {name:?} in {} ({room})", sprout.path.display()),
        None => format!("writes are discarded at umount; --writes NAME keeps them ({room})"),
    }
}
