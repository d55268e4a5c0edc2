//! Tests the whole path of a fetch, from a volume to a web server, through a proxy that corrupts
//! everything it can: no wrong byte is returned, no read waits for ever, and the counters match.

#![allow(clippy::unwrap_used)]

use std::{sync::Arc, time::Duration};

use burgeon_block::{BLOCK_SIZE, ByteRange, Counters, ErrorKind, Now};
use burgeon_cache::{Domain, testing::MemoryStore};
use burgeon_image::{AddressMap, Wanted, builder, prepare};
use burgeon_source::{Access, Directory, Location, Objects, References, Store};
use burgeon_volume::{CacheAccess, ChecksumFile, Volume, VolumeLimits};
use testkit::{AlignedBlock, Fault, Proxy, Rng, WebServer};
use tokio::runtime::Runtime;

type RemoteVolume = Volume<Objects, ChecksumFile>;

/// Runs over the corrupted path, each with its own seed; `SPOILT_SEEDS` asks for more.
const SEEDS: u64 = 40;
/// Concurrent reads.
const READERS: u64 = 4;

/// An image of one file, in a folder behind nginx.
struct Image {
    _folder: tempfile::TempDir,
    web: WebServer,
    map: Arc<AddressMap>,
    /// All of its lazy data.
    data: Vec<u8>,
}

impl Image {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (tree, made) = (folder.path().join("tree"), folder.path().join("made"));
        std::fs::create_dir(&tree).unwrap();
        std::fs::create_dir(&made).unwrap();
        let text = "some text that compresses\n".repeat(40_000);
        std::fs::write(tree.join("noise"), Rng::new(1).bytes(2_000_000)).unwrap();
        std::fs::write(tree.join("text"), text).unwrap();
        let store = Directory::create(folder.path().join("store")).unwrap();
        let options = builder::BuildOptions { level: 1, ..builder::BuildOptions::default() };
        let report = builder::from_directory(&store, "image", &tree, &options, &|_| ()).unwrap();
        let digest = report.image.digest().unwrap();
        let limits = burgeon_image::ManifestLimits::default();
        prepare(&store, &digest, &made, Wanted::default(), &limits, |_| {}, || {}).unwrap();
        let map = Arc::new(AddressMap::open(&made.join("map")).unwrap());
        let web = WebServer::nginx(store.root(), &folder.path().join("nginx")).unwrap();
        let mut image = Self { _folder: folder, web, map, data: Vec::new() };
        let runtime = runtime();
        let _runtime = runtime.enter();
        let local = image.volume(Store::from(store), VolumeLimits::default());
        for address in image.blocks() {
            let block = read(&runtime, &local, address, &Counters::default()).unwrap();
            image.data.extend_from_slice(&block);
        }
        image
    }

    fn volume(&self, store: Store, limits: VolumeLimits) -> Arc<RemoteVolume> {
        let cache = Arc::new(MemoryStore::new(1 << 30));
        let cache = CacheAccess { store: cache, domain: Domain::PUBLIC };
        let objects = Objects::new(store, References::Refuse);
        Volume::new(Arc::clone(&self.map), objects, cache, limits)
    }

    fn behind(&self, proxy: &Proxy) -> Store {
        let location = Location::parse(&format!("http://{}", proxy.address())).unwrap();
        Store::open(&location, &Access::default()).unwrap()
    }

    fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        let range = self.map.data_range();
        (range.start()..range.end()).step_by(BLOCK_SIZE as usize)
    }

    fn expected(&self, address: u64) -> &[u8] {
        let start = (address - self.map.data_range().start()) as usize;
        &self.data[start..start + BLOCK_SIZE as usize]
    }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn read(
    runtime: &Runtime,
    volume: &Arc<RemoteVolume>,
    address: u64,
    counters: &Counters,
) -> burgeon_block::Result<Vec<u8>> {
    let range = ByteRange::at(address, BLOCK_SIZE).unwrap();
    let mut block = AlignedBlock::default();
    if volume.try_read(range, &mut block.0)? == Now::Absent {
        runtime.block_on(volume.read(range, &mut block.0, counters))?;
    }
    Ok(block.0.to_vec())
}

fn limits() -> VolumeLimits {
    VolumeLimits {
        deadline: Duration::from_secs(10),
        try_timeout: Duration::from_millis(500),
        backoff_min: Duration::from_millis(1),
        backoff_max: Duration::from_millis(20),
        ..VolumeLimits::default()
    }
}

#[test]
fn no_wrong_byte_comes_through_a_corrupted_path() {
    let (image, runtime) = (Image::new(), runtime());
    let _runtime = runtime.enter();
    let seeds = std::env::var("SPOILT_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(SEEDS);
    let (mut good, mut failed, mut faults) = (0, 0, 0);
    let (mut told_errors, mut told_corrupt) = (0, 0);
    for seed in 0..seeds {
        let proxy = Proxy::new(image.web.address(), seed).unwrap();
        proxy.spoil(300, &Fault::ALL);
        let volume = image.volume(image.behind(&proxy), limits());
        let counters = Counters::default();
        // A chunk has 64 blocks: this reads a few of each.
        let wanted: Vec<u64> = image.blocks().step_by(23).collect();
        let outcomes = std::thread::scope(|scope| {
            let read_some = |reader: u64| {
                let (mut good, mut failed) = (0, 0);
                for address in wanted.iter().skip(reader as usize).step_by(READERS as usize) {
                    match read(&runtime, &volume, *address, &counters) {
                        Ok(block) => {
                            assert!(block == image.expected(*address), "seed {seed}: {address}");
                            good += 1;
                        }
                        Err(error) => {
                            let eio = [ErrorKind::Unavailable, ErrorKind::Corrupt];
                            assert!(eio.contains(&error.kind()), "seed {seed}: {error}");
                            failed += 1;
                        }
                    }
                }
                (good, failed)
            };
            let readers: Vec<_> =
                (0..READERS).map(|reader| scope.spawn(move || read_some(reader))).collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
        });
        for (ok, not) in outcomes {
            (good, failed) = (good + ok, failed + not);
        }
        faults += proxy.counts().values().sum::<u64>();
        told_errors += counters.source_errors.get();
        told_corrupt += counters.source_corrupt_chunks.get();
        // Once the path is good again, so are the reads.
        proxy.spoil(0, &[]);
        // An answer that was spoilt before may still come.
        assert!(testkit::wait_until(Duration::from_secs(20), || volume.status().in_flight == 0));
        for address in &wanted {
            let block = read(&runtime, &volume, *address, &counters).unwrap();
            assert!(block == image.expected(*address), "seed {seed}: {address} afterwards");
        }
    }
    println!("{seeds} seeds: {good} good reads, {failed} failed, {faults} answers spoilt");
    println!("told: {told_errors} errors of the source, {told_corrupt} wrong chunks");
    assert!(good > 10 * failed && faults > 2 * seeds);
    assert!(told_errors > seeds && told_corrupt > 0);
}

#[test]
fn an_unreachable_store_does_not_delay_local_reads() {
    let (image, runtime) = (Image::new(), runtime());
    let _runtime = runtime.enter();
    let proxy = Proxy::new(image.web.address(), 0).unwrap();
    let short = VolumeLimits { deadline: Duration::from_millis(300), ..limits() };
    let volume = image.volume(image.behind(&proxy), short);
    let counters = Counters::default();
    let (first, last) = (image.blocks().next().unwrap(), image.blocks().last().unwrap());
    assert_eq!(read(&runtime, &volume, first, &counters).unwrap(), image.expected(first));
    assert!(testkit::wait_until(Duration::from_secs(20), || volume.status().in_flight == 0));
    // Connections stay open and silent, which is worse than refused ones.
    proxy.spoil(1000, &[Fault::Stall]);
    let stuck = std::thread::scope(|scope| {
        let stuck = scope.spawn(|| read(&runtime, &volume, last, &counters));
        let range = ByteRange::at(first, BLOCK_SIZE).unwrap();
        let mut block = AlignedBlock::default();
        let served = volume.try_read(range, &mut block.0).unwrap();
        assert_eq!((served, &block.0[..]), (Now::Served, image.expected(first)));
        stuck.join().unwrap()
    });
    let error = stuck.unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::Unavailable, libc::EIO), "{error}");
    drop(proxy);
    assert_eq!(read(&runtime, &volume, last, &counters).unwrap_err().errno(), libc::EIO);
    assert_eq!(read(&runtime, &volume, first, &counters).unwrap(), image.expected(first));
}
