//! `burgeon bundle`: an OCI runtime bundle whose root is a mount.
//!
//! ```text
//!   DIR/rootfs        the mount
//!   DIR/config.json   settings of the image, the user's command, defaults of containerd
//! ```

use std::{
    fs::{self, DirBuilder, File},
    io::Write,
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_container::{ContainerOptions, ContainerProcess};
use burgeon_oci::{ImageSettings, Source};
use rustix::fs::OFlags;
use serde_json::json;

use super::{Context, mount, mount_defaults, named, need_mount_privilege, oci_facts, umount};
use crate::{
    args,
    attributes::Attributes,
    container_args::{Bundle, Choices},
    output,
};

impl Choices {
    /// The arguments of a mount of `image` at `path` for the container.
    pub(super) fn mount(&self, context: &Context, image: &str, path: &Path) -> args::Mount {
        let mut args = args::Mount {
            name: image.to_owned(),
            index: None,
            checked: false,
            pull: self.pull,
            path: path.to_owned(),
            writes: self.writes.clone(),
            // The container makes the places of its file systems first.
            read_only: false,
            write_limit: self.write_limit,
            reserve: None,
            thin: false,
            writes_device: None,
            fill: None,
            let_go: false,
            profile: None,
            transport: None,
            fast: false,
            persist: false,
            virtual_size: None,
            fetch_limit: None,
            attributes: Attributes::default(),
        };
        mount_defaults::apply(context, &mut args);
        args
    }

    /// The image's settings, with the user's in their place, and the program in the mount `root`.
    pub(super) fn process(
        &self,
        context: &Context,
        image: &str,
        root: &Path,
    ) -> Result<(ImageSettings, ContainerProcess)> {
        let pull = self.pull.unwrap_or_default().into();
        let mut settings = oci_facts::settings(context, image, pull)?;
        settings.user = self.user.clone().unwrap_or(settings.user);
        settings.working_dir = self.workdir.clone().unwrap_or(settings.working_dir);
        for variable in &self.env {
            let Some((name, _)) = variable.split_once('=').filter(|(name, _)| !name.is_empty())
            else {
                let what = format!("{variable:?} is not a variable: write --env NAME=VALUE");
                return Err(Error::new(ErrorKind::Invalid, what).into());
            };
            let begin = format!("{name}=");
            settings.env.retain(|known| !known.starts_with(&begin));
            settings.env.push(variable.clone());
        }
        let command: Option<Vec<String>> =
            self.command.iter().map(|word| word.to_str().map(str::to_owned)).collect();
        let command = command.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, "an argument of the command is not UTF-8")
        })?;
        let cannot = |e| Error::io(format!("cannot open {}", root.display()), e);
        let opened = File::open(root).map_err(cannot)?;
        let process = ContainerProcess::new(&settings, &command, opened.as_fd())?;
        Ok((settings, process))
    }
}

/// Refuses an image that has no settings, before anything is mounted.
pub(super) fn need_oci_image(text: &str) -> Result<()> {
    match Source::parse(text) {
        Some(Err(e)) => Err(e.into()),
        Some(Ok(source)) if !source.is_archive() => Ok(()),
        _ => {
            let what = format!(
                "{} is not an OCI image, as oci://… or oci-layout:…, so it has no settings to run \
                 with",
                named::public(text)
            );
            Err(Error::new(ErrorKind::Invalid, what).into())
        }
    }
}

pub(super) fn bundle(context: &Context, args: &Bundle) -> Result<ExitCode> {
    need_mount_privilege("bundle")?;
    need_oci_image(&args.image)?;
    let rootfs = make_folders(&args.dir)?;
    let made = fill(context, args, &rootfs);
    if made.is_err() {
        // Only what this command has made; a folder in use stays.
        let _ = fs::remove_file(args.dir.join("config.json"));
        let _ = fs::remove_dir(&rootfs);
    }
    made
}

/// Mounts the image and writes the configuration.
fn fill(context: &Context, args: &Bundle, rootfs: &Path) -> Result<ExitCode> {
    let choices = &args.choices;
    let (mounted, target) = mount::place(context, choices.mount(context, &args.image, rootfs))?;
    let configured =
        choices.process(context, &args.image, &target).and_then(|(settings, process)| {
            let options = ContainerOptions {
                network: args.network.into(),
                read_only: choices.read_only,
                terminal: args.tty,
                hostname: choices.hostname.clone(),
            };
            let config = burgeon_container::config(&process, &settings, &options);
            write_config(&args.dir.join("config.json"), &config)
        });
    if let Err(e) = configured {
        umount::one(context, &target)?;
        return Err(e);
    }
    if context.json {
        output::print_json(&json!({ "bundle": args.dir, "mount": mounted, "target": target }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let dir = args.dir.display();
    println!("{dir} is a bundle of {}: runc run -b {dir} NAME", named::public(&args.image));
    println!("burgeon umount {} ends its mount", target.display());
    Ok(ExitCode::SUCCESS)
}

/// Makes the bundle's folder and the mount point in it. Nobody else may enter them: the image's
/// set-user-ID programs are behind them.
fn make_folders(dir: &Path) -> Result<PathBuf> {
    let failed = |path: &Path, e| Error::io(format!("cannot make {}", path.display()), e);
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
            take_over(dir)?;
        }
        made => made.map_err(|e| failed(dir, e))?,
    }
    let rootfs = dir.join("rootfs");
    DirBuilder::new().mode(0o700).create(&rootfs).map_err(|e| failed(&rootfs, e))?;
    Ok(rootfs)
}

/// Makes an existing folder, which has to be empty and the caller's own, private.
fn take_over(dir: &Path) -> Result<()> {
    let failed = |e| Error::io(format!("cannot use {} for a bundle", dir.display()), e);
    let refused = |what: String| Err(Error::new(ErrorKind::Invalid, what).into());
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let mut options = File::options();
    let opened = options.read(true).custom_flags(flags.bits() as i32).open(dir).map_err(failed)?;
    if opened.metadata().map_err(failed)?.uid() != rustix::process::geteuid().as_raw() {
        return refused(format!(
            "{} belongs to another user, who could open it again: give a folder of your own",
            dir.display()
        ));
    }
    // Before the mode changes, so that the wrong folder stays as it is.
    if fs::read_dir(dir).map_err(failed)?.next().is_some() {
        return refused(format!("{} is not empty: a bundle needs an empty folder", dir.display()));
    }
    opened.set_permissions(fs::Permissions::from_mode(0o700)).map_err(failed)?;
    Ok(())
}

fn write_config(path: &Path, config: &serde_json::Value) -> Result<()> {
    let failed = |e| Error::io(format!("cannot write {}", path.display()), e);
    // Variables of the environment may be secrets.
    let mut options = File::options();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    let text = serde_json::to_vec_pretty(config).map_err(|e| failed(e.into()))?;
    file.write_all(&text).map_err(failed)?;
    Ok(())
}
