//! `burgeon status`.

use std::{collections::HashMap, process::ExitCode};

use anyhow::Result;
use burgeon_block::Digest;
use burgeon_daemon::{
    Client,
    doctor::mounts_without_daemon,
    kept_profile,
    protocol::{
        AreaStatus, CACHE_FULL, CacheStatus, FillStatus, Latency, MountStatus, OVER_LIMIT,
        ProfileStatus, ReadStatus, WritesState,
    },
    was_recorded,
};
use burgeon_image::load_profile;
use burgeon_source::{Directory, Location};
use serde_json::json;

use super::{Context, without_daemon::no_daemon};
use crate::{
    holders,
    output::{self, bytes, counted, duration_us, percent},
};

pub(super) fn status(context: &Context) -> Result<ExitCode> {
    let Some((_, mut status)) = Client::connect_and_ask(&context.state)? else {
        if context.json {
            let lost = mounts_without_daemon(&context.state);
            let document = json!({ "running": false, "mounts": [], "mounts_without_daemon": lost });
            output::print_json(&document)?;
        } else {
            println!("{}", no_daemon(context));
        }
        return Ok(ExitCode::SUCCESS);
    };
    burgeon_daemon::read_only::note(&mut status);
    let placed = status.mounts.iter().filter(|mount| mount.state != "preparing");
    let held = holders::of_unmounted(placed.filter_map(|mount| mount.fsid));
    let mut layer_bytes = HashMap::new();
    for mount in &mut status.mounts {
        mount.held_by = mount.fsid.and_then(|fsid| held.get(&fsid).cloned());
        complete(context, mount, &mut layer_bytes);
    }
    if context.json {
        let mut document = serde_json::to_value(&status)?;
        document["running"] = true.into();
        output::print_json(&document)?;
        return Ok(ExitCode::SUCCESS);
    }
    let server =
        status.server_pid.map_or("being started".to_owned(), |pid| format!("process {pid}"));
    let silence = if status.server_answers { "" } else { " (DOES NOT ANSWER: `burgeon health`)" };
    println!(
        "daemon {} (process {}), server {server}{silence}, restarted {}",
        status.version,
        status.supervisor_pid,
        counted(status.server_restarts, "time")
    );
    if let Some(cache) = &status.cache {
        println!("the host's cache {}", super::cache::summary(cache));
    }
    if status.mounts.is_empty() {
        println!("nothing is mounted");
    }
    for mount in &status.mounts {
        println!();
        describe(mount, &context.state.store().into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds facts that the daemon does not look up: data in stored layers is local, too, and a profile
/// may have been recorded since the mount. Leaves out unknown facts.
fn complete(context: &Context, mount: &mut MountStatus, layer_bytes: &mut HashMap<Digest, u64>) {
    let image = mount.digest.0;
    let store = match mount.store.folder() {
        Some(folder) => Directory::open(folder).ok(),
        None => None,
    };
    if let (Some(local), Some(store)) = (mount.materialised_bytes, &store)
        && local < mount.data_bytes
        && mount.store == context.state.store().into()
    {
        let of_layers = || burgeon_oci::stored_layer_bytes(store, &image).unwrap_or_default();
        let of_layers = *layer_bytes.entry(image).or_insert_with(of_layers);
        mount.materialised_bytes = Some(local.max(of_layers).min(mount.data_bytes));
    }
    if let Some(profile) = mount.profile.as_mut().filter(|profile| profile.state == "none") {
        let stored = || load_profile(store.as_ref()?, &image).ok()?;
        let kept = || kept_profile(&context.state, &image).ok()?;
        let noted = was_recorded(&context.state, mount.id);
        if noted || stored().or_else(kept).is_some() {
            profile.state = "recorded".to_owned();
        }
    }
}

/// `own` is the state directory's store, which commands use unless they name another.
fn describe(mount: &MountStatus, own: &Location) {
    let reads = &mount.reads;
    println!("{}  {}  ({}, {})", output::path(&mount.target), mount.image, mount.id, mount.state);
    if !mount.name.is_empty() && mount.name != mount.image {
        println!("  name       {}", mount.name);
    }
    if let Some(device) = &mount.device {
        println!("  device     {} over {}", device.display(), mount.transport);
    }
    if let Some(problem) = &mount.problem {
        println!("  problem    {problem}");
    }
    if let Some(holders) = &mount.held_by {
        println!(
            "  UNMOUNTED  but still held by {holders}: it is served, and released when they let go"
        );
    }
    if let Some((found, remedy)) = mount.read_only_problem() {
        println!("  READ-ONLY  {found}: {remedy}");
    }
    let local = match mount.materialised_bytes {
        Some(local) => format!("{} local ({})", bytes(local), share(local, mount.data_bytes)),
        None => "local share unknown".to_owned(),
    };
    println!("  data       {}, {local}", bytes(mount.data_bytes));
    if let Some(fill) = &mount.fill {
        let failed = match fill.failed_bytes {
            0 => String::new(),
            failed => format!(", {} cannot be fetched", bytes(failed)),
        };
        let (done, total) = (bytes(fill.done_bytes), bytes(fill.total_bytes));
        let state = match (fill.state.as_str(), fill.failed_bytes) {
            ("done", 0) => "complete, the store is no longer needed",
            (OVER_LIMIT, _) => "stopped by the fetch limit",
            (CACHE_FULL, _) => {
                "the cache is full; the rest is fetched when it is read, or at the next mount if \
                 `burgeon cache resize` makes room"
            }
            (state, _) => state,
        };
        println!("  fill       {state}: {done} of {total}{failed}");
    }
    if let Some(profile) = &mount.profile {
        println!("  profile    {}", describe_profile(profile));
    }
    println!("  transport  {}", mount.transport);
    if !mount.pins.is_empty() {
        println!("  pinned     {}", pinned(mount));
    }
    println!("  options    {}", mount.attributes);
    println!("  writes     {}", writes(&mount.writes));
    if let Some(area) = &mount.area {
        println!("  virtual    {}", virtual_area(area));
    }
    if let Some(limit) = mount.fetch_limit {
        println!("  limit      {}", fetch_limit(limit, mount));
    }
    let ratio =
        reads.hit_ratio.map_or("no reads yet".to_owned(), |r| format!("{} hits", percent(r)));
    let besides = match reads.background_bytes {
        0 => String::new(),
        besides => format!("; {} prefetched", bytes(besides)),
    };
    println!(
        "  reads      {} local, {} from the source: {ratio}; {}, {}{besides}",
        reads.hits,
        reads.misses,
        counted(reads.fetches, "fetch"),
        bytes(reads.fetched_bytes)
    );
    println!(
        "  latency    local {}; source {}",
        latency(&reads.local_latency),
        latency(&reads.source_latency)
    );
    if let Some(cache) = &mount.cache {
        println!("  cache      {}", describe_cache(cache));
    }
    describe_errors(mount, own);
}

fn describe_profile(profile: &ProfileStatus) -> String {
    let text = match (profile.state.as_str(), &profile.problem) {
        ("none", _) => {
            return "none when the image was mounted; `burgeon record` makes one".to_owned();
        }
        ("recorded", _) => {
            return "recorded after this mount; the next mount of the image uses it".to_owned();
        }
        (state, Some(problem)) => return format!("{state}: {problem}"),
        (state, None) => format!(
            "{state}: {} of {}; {} fetched in {}",
            bytes(profile.done_bytes),
            bytes(profile.total_bytes),
            bytes(profile.fetched_bytes),
            counted(profile.requests, "request")
        ),
    };
    let (prefetched, read) = (profile.prefetched_bytes, profile.read_bytes);
    match prefetched {
        0 => text,
        _ => {
            format!(
                "{text}; of {} prefetched, {} were read",
                bytes(prefetched),
                share(read, prefetched)
            )
        }
    }
}

fn pinned(mount: &MountStatus) -> String {
    let paths = match mount.pins.as_slice() {
        [path] => path.clone(),
        paths => format!("{} paths", paths.len()),
    };
    match &mount.pinned {
        Some(FillStatus { state, total_bytes, done_bytes, .. }) => {
            format!("{state}: {} of {} are local, {paths}", bytes(*done_bytes), bytes(*total_bytes))
        }
        None => format!("{paths}; their local share is unknown"),
    }
}

fn describe_cache(cache: &CacheStatus) -> String {
    let reason = cache.reason.as_deref().unwrap_or("no reason is known");
    let state = match cache.state.as_str() {
        "writing" => "fetched data is kept".to_owned(),
        "full" => format!("FULL, no more fetched data is kept until there is space: {reason}"),
        _ => format!(
            "STOPPED, no more fetched data is kept ({reason}): check the disk; it is \
             tried again every few minutes"
        ),
    };
    let now = match (cache.in_flight, cache.waiting_readers) {
        (0, 0) => String::new(),
        (in_flight, waiting) => format!(
            "; {} in flight, {} waiting",
            counted(in_flight, "chunk"),
            counted(waiting, "read")
        ),
    };
    let ahead = match (cache.ahead_bytes, cache.ahead_read_bytes) {
        (0, _) => String::new(),
        (ahead, read) => {
            format!("; of {} read ahead, {} were of use", bytes(ahead), share(read, ahead))
        }
    };
    format!("{state}{now}{ahead}")
}

/// The command that checks the image `image` of `store`; `own` is the store without an option.
fn verification(image: &str, store: &Location, own: &Location) -> String {
    match store {
        // The image's name says where it is.
        Location::Registry(_) => format!("burgeon verify {image}"),
        store if store == own => format!("burgeon verify {image}"),
        store => format!("burgeon verify {image} --store {store}"),
    }
}

/// Prints every error with its count and remedy.
fn describe_errors(mount: &MountStatus, own: &Location) {
    let ReadStatus {
        failed_reads, source_errors, source_corrupt_chunks, cache_corrupt_blocks, ..
    } = mount.reads;
    let cache = mount.cache.as_ref();
    let of_cache = |count: fn(&CacheStatus) -> u64| cache.map_or(0, count);
    let verify = format!("`{}` says which files", verification(&mount.image, &mount.store, own));
    // Files of this host that changed after `map` are in no image.
    let changed = mount.area.as_ref().map_or(0, |area| area.changed_reads);
    let changed = changed.min(source_corrupt_chunks);
    let of_image = source_corrupt_chunks - changed;
    let errors = [
        (
            failed_reads,
            "reads failed",
            "programs got EIO; repair the objects that the lines below \
            name, then read again",
        ),
        (source_errors, "source errors", "is the store reachable? each read retries for 30 s"),
        (of_image, "corrupt chunks from the source", verify.as_str()),
        (
            changed,
            "fetches from mapped files that have changed",
            "put them back as they were, or remove them from the mount and map them again; the last is \
             named at `virtual`",
        ),
        (cache_corrupt_blocks, "corrupt cached blocks, fetched again", "check the disk"),
        (
            of_cache(|c| c.read_errors),
            "failed reads of the cache, fetched instead",
            "check the disk",
        ),
        (of_cache(|c| c.write_errors), "failed writes of the cache", "see `cache` above"),
        (
            of_cache(|c| c.uncached_chunks),
            "chunks served and not kept",
            "the cache was full, or could not be written (`burgeon cache status`)",
        ),
    ];
    let mut errors = errors.iter().filter(|(count, ..)| *count > 0).peekable();
    if errors.peek().is_none() {
        println!("  errors     none");
    }
    for (count, what, remedy) in errors {
        println!("  errors     {count} {what}: {remedy}");
    }
    if let Some(error) = &mount.last_source_error {
        println!("  last error {error}");
    }
}

fn virtual_area(area: &AreaStatus) -> String {
    let mut text = format!("{} to map into", bytes(area.size));
    if let Some(problem) = &area.problem {
        text += &format!(
            "; LOST, reads of mapped data fail with EIO ({} so far): {problem}; `burgeon doctor` names the \
             remedy",
            area.lost_reads
        );
    }
    if let Some(last) = area.last_unmapped {
        text += &format!(
            "; {} where nothing is mapped, the last at {last}",
            counted(area.unmapped_reads, "read")
        );
    }
    if let Some(last) = &area.last_changed {
        let reads = counted(area.changed_reads, "read");
        text += &format!("; {reads} of sources that have changed: {last}");
    }
    text
}

fn fetch_limit(limit: u64, mount: &MountStatus) -> String {
    let is_over = |state: Option<&String>| state.is_some_and(|state| state == OVER_LIMIT);
    let mut stopped = Vec::new();
    if mount.over_limit_reads > 0 {
        stopped.push(format!("{} refused", counted(mount.over_limit_reads, "read")));
    }
    for (what, state) in [
        ("the profile is not prefetched further", mount.profile.as_ref().map(|p| &p.state)),
        ("pinned data is not fetched further", mount.pinned.as_ref().map(|p| &p.state)),
        ("filling has stopped", mount.fill.as_ref().map(|fill| &fill.state)),
    ] {
        if is_over(state) {
            stopped.push(what.to_owned());
        }
    }
    if stopped.is_empty() {
        return format!("{} may be fetched", bytes(limit));
    }
    format!(
        "ALARM: {}, because at most {} may be fetched: find the program that reads everything, \
         or mount with a higher --fetch-limit",
        stopped.join(", "),
        bytes(limit)
    )
}

fn share(part: u64, whole: u64) -> String {
    percent(if whole == 0 { 1.0 } else { part as f64 / whole as f64 })
}

fn writes(writes: &WritesState) -> String {
    let WritesState::Sprout(sprout) = writes else { return "read-only".to_owned() };
    let name = match &sprout.name {
        Some(name) => format!("kept as {name:?}"),
        None => "discarded at umount".to_owned(),
    };
    let room = match sprout.thin {
        false => format!("{} reserved", bytes(sprout.limit)),
        true => {
            format!("up to {}, {} reserved so far", bytes(sprout.limit), bytes(sprout.reserved))
        }
    };
    format!("{name}, {room}")
}

fn latency(latency: &Latency) -> String {
    match (latency.p50_us, latency.p90_us, latency.p99_us) {
        (Some(p50), Some(p90), Some(p99)) => {
            format!("p50 {}, p90 {}, p99 {}", duration_us(p50), duration_us(p90), duration_us(p99))
        }
        _ => "none measured".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use burgeon_source::Location;

    use super::verification;

    #[test]
    fn an_image_is_verified_in_the_store_that_it_is_of() {
        let [own, other] = ["/own", "/other"].map(|path| Location::parse(path).unwrap());
        assert_eq!(verification("a:1", &own, &own), "burgeon verify a:1");
        assert_eq!(verification("a:1", &other, &own), "burgeon verify a:1 --store /other");
        let bucket = Location::parse("s3://bucket/x").unwrap();
        assert_eq!(verification("a:1", &bucket, &own), "burgeon verify a:1 --store s3://bucket/x");
    }
}
