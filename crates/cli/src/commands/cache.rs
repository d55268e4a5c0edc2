//! `burgeon cache`: shows and changes the host's cache, which the images of all mounts share.

use std::{collections::HashMap, process::ExitCode};

use anyhow::Result;
use burgeon_block::{Error, ErrorKind};
use burgeon_daemon::{
    Client,
    doctor::mounts_without_daemon,
    protocol::{CacheAmount, CacheAnswer, CacheRequest, HostCache, ReadBytes, Reply, Request},
};
use clap::{Args as ClapArgs, Subcommand};

use super::{
    Context,
    cache_parts::{self, TypedLimit, parse_limit},
    named,
    without_daemon::no_daemon,
};
use crate::{
    output::{self, bytes, counted},
    quantities::{parse_amount, parse_rate, parse_size},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  burgeon cache status
  burgeon cache resize 200G
  burgeon cache resize 10% --keep-free 50G
  burgeon cache resize --limit debian:12=10G --limit s3://bucket/images=none
  burgeon cache drop debian:12";

/// Rate of `scrub`, in bytes a second, unless the user names another.
const SCRUB_RATE: u64 = 100 << 20;

#[derive(ClapArgs, Debug)]
pub(crate) struct Cache {
    #[command(subcommand)]
    pub(crate) command: CacheCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum CacheCommand {
    /// Show the cache's size, limits, admissions and evictions
    Status,
    /// Change the cache's limits, now and for later daemons
    Resize {
        /// Maximum size of the cache: a size, or a share of its disk
        #[arg(value_name = "SIZE|PERCENT", value_parser = parse_amount)]
        limit: Option<CacheAmount>,
        /// Space of its disk that the cache leaves free (at first 25%)
        #[arg(long, value_name = "SIZE|PERCENT", value_parser = parse_amount)]
        keep_free: Option<CacheAmount>,
        /// Limit the cached data of an image or a store; `none` removes the limit; may be given
        /// several times
        #[arg(long = "limit", value_name = "STORE|IMAGE=SIZE", value_parser = parse_limit)]
        limits: Vec<TypedLimit>,
    },
    /// Free SIZE bytes of cached data
    Evict {
        /// The bytes to free
        #[arg(value_parser = parse_size)]
        size: u64,
    },
    /// Remove the data of an image, including data shared with other images
    Drop {
        /// The image
        image: String,
    },
    /// Verify all cached data, and discard damaged chunks
    Scrub {
        /// Bytes a second
        #[arg(long, value_name = "SIZE", default_value_t = SCRUB_RATE, value_parser = parse_rate)]
        rate: u64,
    },
}

pub(super) fn cache(context: &Context, command: CacheCommand) -> Result<ExitCode> {
    let request = match &command {
        CacheCommand::Status => CacheRequest::Show,
        CacheCommand::Resize { limit, keep_free, limits } => {
            let parts: Result<_> =
                limits.iter().map(|limit| cache_parts::resolve(context, limit)).collect();
            CacheRequest::Resize { limit: *limit, keep_free: *keep_free, parts: parts? }
        }
        CacheCommand::Evict { size } => CacheRequest::Evict { bytes: *size },
        CacheCommand::Drop { image } => {
            let store = context.open_store()?;
            let digest = named::resolve(context, &store, image)?.digest()?;
            CacheRequest::Drop { digest: digest.into() }
        }
        CacheCommand::Scrub { rate } => CacheRequest::Scrub { bytes_per_second: *rate },
    };
    let Some((client, status)) = Client::connect_and_ask(&context.state)? else {
        let what = match mounts_without_daemon(&context.state) {
            0 => "no daemon runs: mount an image first".into(),
            _ => no_daemon(context),
        };
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    };
    if let Some(server) = status.server_pid.filter(|_| !status.server_answers) {
        let what = format!(
            "the server, process {server}, has the cache and does not answer: `burgeon health` tells \
             more"
        );
        return Err(Error::new(ErrorKind::Unavailable, what).into());
    }
    let changed = match &request {
        CacheRequest::Resize { parts, .. } => parts.clone(),
        _ => Vec::new(),
    };
    let (Reply::Cache(mut answer), _) = client.call(&Request::Cache(request))? else {
        anyhow::bail!(
            "the daemon has not answered a request about the cache: it is of another version; run \
             `burgeon upgrade`"
        );
    };
    cache_parts::check(&changed, &answer)?;
    let known = match answer.parts.is_empty() && !matches!(command, CacheCommand::Status) {
        true => HashMap::new(),
        false => cache_parts::known(context, &client),
    };
    if matches!(command, CacheCommand::Status) {
        cache_parts::add_layers(&mut answer, &known);
    }
    if context.json {
        output::print_json(&cache_parts::to_json(&answer, &known)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    say(&command, &answer);
    if matches!(command, CacheCommand::Status) || !changed.is_empty() {
        cache_parts::show(&answer, &known);
    }
    Ok(ExitCode::SUCCESS)
}

fn say(command: &CacheCommand, answer: &CacheAnswer) {
    let CacheAnswer { bytes: done, chunks, cache, .. } = answer;
    match command {
        CacheCommand::Status => show(cache),
        CacheCommand::Resize { .. } => {
            println!("the cache {}", summary(cache));
            if let Some(why) = cache.lacks_space() {
                println!("nothing is kept now: {why}");
            }
        }
        CacheCommand::Evict { size } => {
            println!("{} are free again", bytes(*done));
            if done < size {
                println!("nothing more can be evicted: {} are pinned", bytes(cache.held));
            }
        }
        CacheCommand::Drop { image } => {
            let chunks = counted(*chunks, "chunk");
            println!("{chunks} of {image} left the cache: {}", bytes(*done));
            if cache.lent > 0 {
                let lent = bytes(cache.lent);
                println!("{lent} stay, because mounts that were let go share them");
            }
        }
        CacheCommand::Scrub { .. } => {
            let chunks = counted(*chunks, "damaged chunk");
            println!("{} were read; {chunks} left the cache", bytes(*done));
        }
    }
}

/// One line for `burgeon status`.
pub(super) fn summary(cache: &HostCache) -> String {
    let HostCache { used, limit, floor, .. } = cache;
    format!("takes {} of {} and leaves {} free", bytes(*used), bytes(*limit), bytes(*floor))
}

fn show(cache: &HostCache) {
    let ratio = |read: &ReadBytes| {
        let text = read.hit_ratio().map(|percent| format!("{percent:.1} %"));
        text.unwrap_or_else(|| "nothing read".to_owned())
    };
    let HostCache { read, read_in_a_minute: minute, read_in_an_hour: hour, .. } = cache;
    let hits = [minute, hour, read].map(ratio);
    let hits = format!("{} in a minute, {} in an hour, {} in all", hits[0], hits[1], hits[2]);
    let estimate = cache.hit_permille.map_or_else(
        || "too little was read".to_owned(),
        |permille| {
            let [half, same, twice] = permille.map(|permille| f64::from(permille) / 10.0);
            format!("{half:.1} % at half the size, {same:.1} % now, {twice:.1} % at twice the size")
        },
    );
    if let Some(problem) = &cache.problem {
        println!("{:<10} nothing is kept: {problem}", "problem");
    }
    if cache.scrubbing {
        println!("{:<10} runs", "scrub");
    }
    if let Some(folder) = &cache.folder {
        println!("{:<10} {}", "folder", folder.display());
    }
    for earlier in &cache.earlier {
        let shown = earlier.display();
        println!("{:<10} {shown}: nobody uses it; remove its files to free its space", "earlier");
    }
    let rows = [
        ("hits", hits),
        ("estimate", estimate),
        ("used", format!("{} in {}", bytes(cache.used), counted(cache.chunks, "chunk"))),
        ("layers", format!("{} stored, which may be evicted", bytes(cache.layers.unwrap_or(0)))),
        ("limit", bytes(cache.limit)),
        ("floor", format!("{} stay free; {} are", bytes(cache.floor), bytes(cache.free))),
        ("lent", format!("{} shared with plain files, not counted", bytes(cache.lent))),
        ("pinned", bytes(cache.held)),
        ("fetched", bytes(cache.read.fetched)),
        ("shared", format!("{} that another image had fetched", bytes(cache.shared))),
        ("admitted", format!("{}; {} were refused", bytes(cache.admitted), bytes(cache.refused))),
        ("evicted", bytes(cache.evicted)),
        ("written", bytes(cache.written)),
        ("damaged", counted(cache.doubted, "chunk")),
        ("errors", format!("{} of reads, {} of writes", cache.read_errors, cache.write_errors)),
    ];
    for (name, text) in rows {
        println!("{name:<10} {text}");
    }
}
