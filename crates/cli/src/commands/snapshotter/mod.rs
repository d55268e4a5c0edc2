//! `burgeon snapshotter`: snapshots for containerd.
//!
//! ```text
//!   snapshotter          serves containerd's proxy plugin until it is killed
//!   snapshotter setup    the configuration of containerd and of the unit
//!   snapshotter verify   reads the layers of remote chains, and compares them with their images
//!   snapshotter fetch    puts layers into containerd's content store
//!   snapshotter status   what the records say, whether or not it runs
//!   snapshotter index    a command of its own: the index of an image, in the background
//! ```

mod chain_source;
mod fetch;
mod floor;
mod index;
mod layers;
mod restart;
mod setup;
mod status;
mod verify;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::Result;
use burgeon_daemon::log;
use burgeon_snapshotter::{Containers, Snapshotter, Socket, containers::ContainerForm};

use self::layers::OwnLayers;
use super::{Context, HOSTS_DIR};
use crate::exit::Usage;

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon snapshotter                 serve containerd until it is killed
  burgeon snapshotter status          show its snapshots, also while it does not run
  nerdctl --snapshotter burgeon run -it docker.io/library/python:3.12 python
  burgeon snapshotter verify          compare the layers of trusted repositories with their images
  burgeon snapshotter fetch registry.example/app:2    give containerd the layers that a push needs
  burgeon snapshotter setup           show the configuration that containerd needs
  burgeon snapshotter setup --write --trust 'registry.example/team/*'";

#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = false)]
pub(crate) struct Snapshots {
    #[command(subcommand)]
    command: Option<SnapshotsCommand>,
    /// Directory of the snapshots; default: snapshotter/ in the state directory
    #[arg(long, value_name = "DIR", global = true)]
    root: Option<PathBuf>,
    /// Socket that containerd connects to
    #[arg(
        long,
        value_name = "PATH",
        global = true,
        default_value = "/run/burgeon/snapshotter.sock"
    )]
    socket: PathBuf,
    /// Mount layers of repositories that match, such as registry.example/team/*, instead of
    /// unpacking them: their publishers can then decide the contents of equal layers elsewhere
    #[arg(long, value_name = "PATTERN", global = true)]
    trust: Vec<String>,
    /// Form of containers above mounted layers: overlay (shared page cache), native (a mount each),
    /// or auto, which is overlay in the namespace k8s.io and native in others
    #[arg(long, value_name = "auto|overlay|native", global = true, default_value = "auto")]
    containers: ContainerForm,
    /// Containers of repositories that match are native
    #[arg(long, value_name = "PATTERN", global = true)]
    native: Vec<String>,
    /// Containers of repositories that match are overlay, also if they match --native
    #[arg(long, value_name = "PATTERN", global = true)]
    overlay: Vec<String>,
    /// Limit of the writes of each native container [default: that of burgeon mount]
    #[arg(long, value_name = "SIZE", value_parser = crate::quantities::parse_size, global = true)]
    write_limit: Option<u64>,
    /// Socket of the containerd whose content store gets the changes of containers, as images are
    /// committed
    #[arg(
        long,
        value_name = "PATH",
        global = true,
        default_value = "/run/containerd/containerd.sock"
    )]
    containerd: PathBuf,
    /// containerd's content store, from which indexes of images are made [default:
    /// /var/lib/containerd/io.containerd.content.v1.content]
    #[arg(long, value_name = "DIR", global = true)]
    content_store: Option<PathBuf>,
}

#[derive(clap::Subcommand, Debug)]
enum SnapshotsCommand {
    /// Show the snapshots
    Status,
    /// Read all layers of remote images, and compare them with the diff IDs that the images state
    Verify,
    /// Fetch the layers of an image that containerd's content store lacks, so that it can be pushed
    Fetch(fetch::Fetch),
    /// Show or write the configuration for the containerd that is installed
    Setup(setup::Setup),
    /// Make the index of an image in the background: the snapshotter starts it
    #[command(hide = true)]
    Index(index::Index),
}

impl Snapshots {
    /// True if the command serves: it makes what is missing.
    pub(crate) fn serves(&self) -> bool {
        self.command.is_none()
    }

    /// Refuses options that would have no effect.
    fn check(&self) -> Result<(), Usage> {
        let patterns = self.native.len() + self.overlay.len();
        let has_none = patterns == 0
            && self.write_limit.is_none()
            && self.content_store.is_none()
            && self.containers == ContainerForm::default();
        match self.serves() || has_none {
            true => Ok(()),
            false => Err(Usage(
                "--containers, --native, --overlay, --write-limit and --content-store are options of the \
                 service: add them to ExecStart= of burgeon-snapshotter.service (`systemctl edit`)"
                    .to_owned(),
            )),
        }
    }
}

pub(super) fn snapshotter(context: &Context, args: &Snapshots) -> Result<ExitCode> {
    let root = args.root.clone().unwrap_or_else(|| context.state.root().join("snapshotter"));
    args.check()?;
    match &args.command {
        Some(SnapshotsCommand::Setup(setup)) => {
            setup::setup(context, &root, (&args.socket, &args.containerd), &args.trust, setup)
        }
        Some(SnapshotsCommand::Status) => status::status(context, &root),
        Some(SnapshotsCommand::Fetch(args)) => fetch::fetch(context, &root, args),
        Some(SnapshotsCommand::Index(args)) => index::index(context, args),
        Some(SnapshotsCommand::Verify) => verify::verify(context, &root),
        None => serve(context, root, args),
    }
}

/// The folder that containerd's own documentation gives for `hosts.toml`.
const HOSTS: &str = "/etc/containerd/certs.d";

/// That folder, if it is there and neither the configuration nor the environment names another one.
fn default_hosts(context: &Context) -> Option<&'static Path> {
    let is_named =
        context.config.registry.hosts_dir.is_some() || std::env::var_os(HOSTS_DIR).is_some();
    Some(Path::new(HOSTS)).filter(|folder| !is_named && folder.is_dir())
}

/// containerd's content store, if its own root is the default one.
const CONTENT_STORE: &str = "/var/lib/containerd/io.containerd.content.v1.content";

fn serve(context: &Context, root: PathBuf, args: &Snapshots) -> Result<ExitCode> {
    log::begin(log::LogOwner::Daemon);
    // Its memory holds credentials of registries.
    burgeon_daemon::forbid_core_dumps();
    // Measuring a tree takes a descriptor for each folder that it is in.
    raise_descriptors();
    if let Some(folder) = default_hosts(context) {
        burgeon_source::registry::use_hosts_of(folder.into());
    }
    if let Some(folder) = args.content_store.as_ref().filter(|it| !it.join(index::BLOBS).is_dir()) {
        // containerd may make it later.
        eprintln!(
            "burgeon: {} has no {} now: while that is so, indexes are made from the registry",
            folder.display(),
            index::BLOBS
        );
    }
    let snapshotter = Snapshotter::open(&root)?;
    let root = root.canonicalize()?;
    let layers = OwnLayers::new(
        context.clone(),
        &root,
        args.trust.clone(),
        args.write_limit,
        args.content_store.clone().unwrap_or_else(|| CONTENT_STORE.into()),
    );
    let containers = Containers {
        form: args.containers,
        native: args.native.clone(),
        overlay: args.overlay.clone(),
    };
    let snapshotter = snapshotter
        .with_layers(Arc::new(layers))
        .with_containers(containers)
        .with_containerd(args.containerd.clone());
    let snapshotter = Arc::new(snapshotter);
    let socket = Socket::bind(&args.socket)?;
    restart::begin(context.state.clone())?;
    burgeon_daemon::notify_systemd();
    burgeon_snapshotter::serve(snapshotter, socket)?;
    Ok(ExitCode::SUCCESS)
}

fn raise_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it fails, very deep trees cannot be measured, and the error says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}
