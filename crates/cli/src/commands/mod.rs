//! One module for each verb or family of verbs.

pub(crate) mod accelerate;
mod built;
mod bundle;
pub(crate) mod cache;
mod cache_parts;
pub(crate) mod config;
mod demo;
mod disk_errors;
pub(crate) mod disks;
mod doctor;
pub(crate) mod export;
mod far;
mod finding;
pub(crate) mod health;
pub(crate) mod images;
mod inspect;
pub(crate) mod kubelet;
mod let_go;
pub(crate) mod log;
mod map;
pub(crate) mod metrics;
mod mistakes;
pub(crate) mod mount;
pub(crate) mod mount_defaults;
pub(crate) mod mount_point;
mod named;
mod oci_facts;
mod oci_image;
mod persist;
mod pin;
mod places;
mod prefetch;
mod profile;
mod push;
pub(crate) mod reading;
mod record;
mod report;
pub(crate) mod resume;
mod room;
mod run;
mod shutdown;
pub(crate) mod snapshotter;
mod status;
mod store;
mod taken;
mod top;
mod trace;
pub(crate) mod umount;
mod upgrade;
mod without_daemon;
mod work;
mod writes;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{Client, DirectoryIdentity, StateDir};
use burgeon_image::{builder::BuildOptions, catalog::Provenance};
use burgeon_oci::{Documents, Unpackings};
use burgeon_source::{
    Access, Location, Store,
    registry::{Name, PROVIDER_DIR, PROVIDERS, Providers},
};

use crate::{
    args::{Args, Command},
    config::{Config, is_store_name},
    exit::{NotPermitted, Usage},
    global::{self, Global},
};

/// The common input of all commands.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) state: StateDir,
    /// The absolute store of `--store`; `None` means the state directory's own.
    pub(crate) store: Option<Location>,
    /// The repository given as `--store`: its tags are the images.
    pub(crate) repository: Option<String>,
    /// The configuration, with defaults of mounts.
    pub(crate) config: Config,
    pub(crate) json: bool,
}

impl Context {
    /// With `takes_repository`, `--store` may name a repository. Only commands that put something
    /// into a named state directory create it; for the others, a missing one is probably a typing
    /// error.
    pub(crate) fn new(
        global: Global,
        config: Config,
        takes_repository: bool,
        only_looks: bool,
    ) -> Result<Self> {
        if let Some(place) = &config.place {
            burgeon_daemon::pass_on(global::CONFIG, place.clone());
        }
        let configured = config.registry.hosts_dir.as_ref().map(|folder| folder.value.clone());
        let named = std::env::var_os(HOSTS_DIR).map(PathBuf::from).filter(|it| it.is_absolute());
        if let Some(folder) = named.or(configured) {
            burgeon_source::registry::use_hosts_of(folder);
        }
        if let Some(providers) = config.registry.providers() {
            if Providers::of_environment().is_some() {
                burgeon_daemon::pass_on(PROVIDERS, providers.file.clone().into());
                burgeon_daemon::pass_on(PROVIDER_DIR, providers.folder.clone().into());
            }
            providers.use_for_logins();
        }
        let configured = config.state_dir.as_ref().map(|setting| setting.value.clone());
        let state_dir = global.state_dir.or(configured);
        let is_named = state_dir.is_some();
        let path = match state_dir {
            Some(path) => std::path::absolute(&path)
                .with_context(|| format!("cannot find the state directory {}", path.display()))?,
            None => StateDir::default_path()?,
        };
        let is_repository = |text: &String| {
            let name = Name::parse(text);
            takes_repository && name.is_some_and(|n| n.is_ok_and(|n| n.digest().is_none()))
        };
        let given = global.store.as_deref();
        note_folder(&config, given);
        let (repository, store) = match config.stores.choose(given) {
            Some((text, _)) if is_repository(&text) => (Some(text), None),
            chosen => (None, chosen.map(|(text, origin)| parse_store(&text, &origin)).transpose()?),
        };
        // A restored backup may have only some of these.
        let is_one = ["run", "writes", "store"].iter().any(|name| path.join(name).is_dir());
        let state = match only_looks && is_named && !is_one {
            true => StateDir::find(&path),
            false => StateDir::open(&path),
        };
        let state = state.map_err(|e| not_permitted(&path, e))?;
        place_cache(&state, global.cache_dir.as_deref(), &config)?;
        Ok(Self { state, store, repository, config, json: global.json })
    }

    /// The image `name` of the repository, if `--store` names one.
    pub(crate) fn in_repository(&self, name: &str) -> Result<Option<Name>> {
        let repository = self.repository.as_ref();
        Ok(repository.and_then(|repository| Name::tagged(repository, name)).transpose()?)
    }

    /// Opens the store. A named store must exist.
    pub(crate) fn open_store(&self) -> Result<Store> {
        match &self.store {
            Some(location) => Ok(Store::open(location, &Access::from_env())?),
            None => self.own_store(),
        }
    }

    /// Opens the store. Creates the folder of a named store if it is missing.
    pub(crate) fn create_store(&self) -> Result<Store> {
        match &self.store {
            Some(location) => Ok(Store::create(location, &Access::from_env())?),
            None => self.own_store(),
        }
    }

    /// The state directory's own store, created with the state directory. If it is missing later,
    /// it may be temporarily away, and an empty one in its place would hide it on its return.
    fn own_store(&self) -> Result<Store> {
        let folder = self.state.store();
        if folder.is_dir() {
            return Ok(Store::create(&folder.into(), &Access::from_env())?);
        }
        self.need_state()?;
        let what = format!(
            "the store {} does not exist: mount or restore it, or make an empty folder of that name to \
             begin anew",
            folder.display()
        );
        Err(Error::new(ErrorKind::NotFound, what).into())
    }

    /// Refuses a state directory that is not there.
    fn need_state(&self) -> Result<()> {
        if self.state.exists() {
            return Ok(());
        }
        let what = format!(
            "there is no state directory {}: is it another one (--state-dir)? `burgeon build` and \
             `burgeon mount` make it",
            self.state.root().display()
        );
        Err(Error::new(ErrorKind::NotFound, what).into())
    }

    /// This host's knowledge of images, as a user of the store.
    pub(crate) fn provenance(&self) -> Provenance {
        Provenance::new(self.state.provenance(), self.store_location().to_string())
    }

    /// The documents of OCI images on this host.
    pub(crate) fn documents(&self) -> Documents {
        Documents::new(self.state.documents())
    }

    /// The digests of unpacked layers that this host has computed.
    pub(crate) fn unpackings(&self) -> Unpackings {
        Unpackings::new(self.state.unpacked())
    }

    /// The default options of a build in the store.
    pub(crate) fn build_options(&self) -> BuildOptions {
        BuildOptions { provenance: Some(self.provenance()), ..BuildOptions::default() }
    }

    /// Identity of the store's folder as seen by this process, if the store is a folder.
    pub(crate) fn store_identity(&self) -> Option<DirectoryIdentity> {
        DirectoryIdentity::of(self.store_location().folder()?)
    }

    /// The location of the store.
    pub(crate) fn store_location(&self) -> Location {
        self.store.clone().unwrap_or_else(|| self.state.store().into())
    }
}

/// Takes the cache's bounds from `config`, and its folder from `given`, the option, or `config`. A
/// daemon does not start with an option that cannot be used; what only asks the running one does
/// not care.
fn place_cache(state: &StateDir, given: Option<&Path>, config: &Config) -> Result<()> {
    config.cache.configure();
    let Some(dir) = given.filter(|dir| !dir.as_os_str().is_empty()) else {
        if let Some(setting) = &config.cache.dir {
            burgeon_daemon::configure_cache_dir(setting.value.clone());
        }
        return Ok(());
    };
    let dir = std::path::absolute(dir)?;
    burgeon_daemon::pass_on(burgeon_daemon::CACHE_DIR, dir.clone().into());
    burgeon_daemon::configure_cache_dir(dir);
    let (current, next) = burgeon_daemon::cache_dirs(state);
    if let Some(next) = next
        && Client::connect(state)?.is_some()
    {
        let (current, next) = (current.display(), next.display());
        eprintln!(
            "note: the running daemon has its cache in {current}; {next} is for the next daemon: run \
             `burgeon shutdown` before"
        );
    }
    Ok(())
}

/// The store `text`, which an option, a variable or the configuration names.
fn parse_store(text: &str, origin: &str) -> Result<Location> {
    let told = |error| match error {
        error if ErrorKind::Invalid == Error::kind(&error) => {
            Usage(format!("{origin}: {error}")).into()
        }
        error => error.into(),
    };
    Location::parse(text).map_err(told)
}

/// Notes that the store which is `given` by its name is not the folder of that name.
fn note_folder(config: &Config, given: Option<&str>) {
    let Some(name) = given.filter(|text| is_store_name(text) && Path::new(text).is_dir()) else {
        return;
    };
    if let Some(store) = config.stores.named.get(name) {
        let (url, origin) = (&store.value, &store.origin);
        eprintln!("note: the store {name} is {url} ({origin}); the folder is ./{name}");
    }
}

/// Names the folder of `HOST/hosts.toml`, above the configuration.
pub(crate) const HOSTS_DIR: &str = "BURGEON_REGISTRY_HOSTS_DIR";

/// Runs the command.
pub(crate) fn run(args: Args) -> Result<ExitCode> {
    let takes_repository =
        matches!(args.command, Command::Build(_) | Command::Mount(_) | Command::Pull(_));
    // The demo uses its own state directory, and creates no other.
    if let Command::Demo(demo) = args.command {
        return demo::demo(args.global.json, &demo);
    }
    // It has no access to a state directory.
    if let Command::Metrics(options) = args.command {
        return metrics::metrics(&args.global, options);
    }
    if let Command::Config(config) = args.command {
        return config::config(&args.global, config.command);
    }
    // Programs of the user have the signal as it was.
    if !matches!(args.command, Command::Run(_) | Command::Record(_)) {
        burgeon_daemon::report_file_limit();
    }
    let config = read_config(&args.global, &args.command)?;
    let mut context =
        Context::new(args.global, config, takes_repository, only_looks(&args.command))?;
    // Standard output belongs to the program.
    context.json |= matches!(args.command, Command::Run(_));
    let stores_images = takes_repository
        || matches!(args.command, Command::Index(_) | Command::Bundle(_) | Command::Run(_));
    let done = perform(&context, args.command);
    done.map_err(|e| disk_errors::explain(&context, e, stores_images))
}

fn perform(context: &Context, command: Command) -> Result<ExitCode> {
    match command {
        Command::Build(build) => images::build(context, build),
        Command::Index(index) => oci_image::index(context, &index),
        Command::Mount(mount) => mount::mount(context, mount),
        Command::Bundle(args) => bundle::bundle(context, &args),
        Command::Run(args) => run::run(context, &args),
        Command::CreateEmpty(empty) => mount::create_empty(context, empty),
        Command::Map(map) => map::map(context, map),
        Command::Pin(pin) => pin::pin(context, pin),
        Command::LetGo(args) => let_go::let_go(context, &args),
        Command::Cache(cache) => cache::cache(context, cache.command),
        Command::Push(push) => push::push(context, &push),
        Command::Pull(pull) => push::pull(context, pull),
        Command::Prefetch(prefetch) => prefetch::prefetch(context, prefetch),
        Command::Record(record) => record::record(context, record),
        Command::Profile(profile) => profile::profile(context, profile.command),
        Command::Umount(umount) => umount::umount(context, umount),
        Command::Export(args) => export::export(context, args),
        Command::Status => status::status(context),
        Command::List => images::list(context),
        Command::Inspect(inspect) => inspect::inspect(context, inspect),
        Command::Verify(named) => store::verify(context, &named.name),
        Command::Rm(named) => store::remove(context, &named.name),
        Command::Gc(gc) => store::collect(context, gc.dry_run),
        Command::Writes(writes) => writes::writes(context, writes.command),
        Command::Accelerate(args) => accelerate::accelerate(context, args.command),
        Command::Disks(disks) => disks::disks(context, &disks),
        Command::Health(options) => health::report(context, &options),
        Command::Trace(options) => trace::trace(context, &options),
        Command::Top(options) => top::top(context, &options),
        Command::Log(log) => log::log(context, log),
        Command::Snapshotter(args) => snapshotter::snapshotter(context, &args),
        Command::Doctor(doctor) => doctor::doctor(context, doctor),
        Command::Demo(_) | Command::Config(_) | Command::Metrics(_) => unreachable!("it was run"),
        Command::Shutdown(shutdown) => shutdown::shutdown(context, shutdown),
        Command::Upgrade(upgrade) => upgrade::upgrade(context, upgrade),
    }
}

/// The configuration. One with problems does not stop commands that look at mounts or end them:
/// they use the valid settings.
fn read_config(global: &Global, command: &Command) -> Result<Config> {
    let place = global.config.as_deref();
    let goes_on = matches!(
        command,
        Command::Umount(_)
            | Command::Shutdown(_)
            | Command::Status
            | Command::Snapshotter(_)
            | Command::Doctor(_)
            | Command::Health(_)
            | Command::Log(_)
            | Command::Upgrade(_)
    );
    if !goes_on {
        return Ok(Config::load(place)?);
    }
    let (config, problems) = Config::examine(place);
    for problem in problems {
        eprintln!("warning: the configuration has a problem: {problem}");
    }
    Ok(config)
}

/// True if a command only reads existing state, and needs no new state directory.
fn only_looks(command: &Command) -> bool {
    match command {
        Command::Build(_)
        | Command::Index(_)
        | Command::Mount(_)
        | Command::Bundle(_)
        | Command::Run(_)
        | Command::CreateEmpty(_)
        | Command::Pull(_)
        | Command::Accelerate(_)
        | Command::Disks(_)
        | Command::Config(_)
        | Command::Demo(_) => false,
        Command::Doctor(doctor) => !doctor.repair,
        Command::Snapshotter(args) => !args.serves(),
        _ => true,
    }
}

/// Names the missing privilege if a state directory belongs to another user.
fn not_permitted(path: &Path, error: Error) -> anyhow::Error {
    use rustix::fs::{Access, access};
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let denied = access(there, Access::WRITE_OK | Access::EXEC_OK);
    // A file cannot be entered anyway.
    if denied != Err(rustix::io::Errno::ACCESS) || !there.is_dir() {
        return error.into();
    }
    let what = format!(
        "{error}: {} is another user's, and the capability CAP_DAC_OVERRIDE is missing: run it as \
         root, for example with sudo, or name a directory of your own with --state-dir",
        there.display()
    );
    NotPermitted(what).into()
}

/// Refuses early, naming the missing privilege, if mounting cannot work.
pub(crate) fn need_mount_privilege(verb: &str) -> Result<()> {
    let sets = rustix::thread::capabilities(None)
        .map_err(|e| anyhow::anyhow!("cannot tell which privileges there are: {e}"))?;
    if sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN) {
        return Ok(());
    }
    Err(NotPermitted(format!(
        "`burgeon {verb}` needs the capability CAP_SYS_ADMIN, which is missing: run it as root, for \
         example with sudo"
    ))
    .into())
}
