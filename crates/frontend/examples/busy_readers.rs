//! Reads of a busy mount: reader threads that come and go, against a fixed thread each. As root:
//!
//! ```text
//! cargo run --release -p burgeon-frontend --example busy_readers -- [threads] [rounds] [milliseconds]
//! ```
//!
//! In each round both serve the same computed device behind FUSE and a loop device, one after the
//! other, to as many readers as threads (4 KiB, random, direct). A fixed thread each is as many
//! servers of one connection as threads, each of one thread that never calls for help. The last
//! line is the median of the rounds' ratios; rounds are short and many, because other programs
//! disturb them. It leaves nothing behind.

use std::{
    env,
    error::Error,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Now, Result, Shape};
use burgeon_frontend::{Connection, LoopDevice, LoopOptions, ServeOptions, Slots, serve};

/// Bytes of the device: more than any cache in between would hold.
const SIZE: u64 = 1 << 40;

/// Zeros: all that a read costs is the way to the device.
struct Zeros;

impl BlockDevice for Zeros {
    fn shape(&self) -> Shape {
        Shape::read_only(SIZE)
    }

    fn try_read(&self, _: u64, buf: &mut [u8]) -> Result<Now> {
        buf.fill(0);
        Ok(Now::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.try_read(offset, buf).map(|_| ())
    }
}

#[repr(align(4096))]
struct Block([u8; BLOCK_SIZE as usize]);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let argument = |number, default: u64| {
        env::args().nth(number).map_or(Ok(default), |text| text.parse::<u64>())
    };
    let (threads, rounds) = (argument(1, 4)? as usize, argument(2, 21)? as usize);
    let length = Duration::from_millis(argument(3, 500)?);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build()?;
    let mut options = ServeOptions::new(runtime.handle().clone());
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let mut measure = |servers, threads_each| {
            options.threads = threads_each;
            reads_a_second(servers, &options, threads, length)
        };
        let mut pair = [0.0; 2];
        // The order alternates.
        for which in [round % 2, 1 - round % 2] {
            pair[which] = match which {
                0 => measure(1, threads)?,
                _ => measure(threads, 1)?,
            };
        }
        let [pool, fixed] = pair;
        println!("{pool:9.0} reads/s with helpers, {fixed:9.0} with a fixed thread each");
        ratios.push(pool / fixed);
    }
    ratios.sort_by(f64::total_cmp);
    println!("{threads} readers: helpers ÷ fixed threads: {:.3}", ratios[ratios.len() / 2]);
    Ok(())
}

fn reads_a_second(
    servers: usize,
    options: &ServeOptions,
    readers: usize,
    length: Duration,
) -> std::result::Result<f64, Box<dyn Error>> {
    let connection = Connection::new("burgeon-busy-readers")?;
    let serve = || -> std::result::Result<_, Box<dyn Error>> {
        let fuse = connection.device().try_clone_to_owned()?;
        Ok(serve(fuse, Arc::new(Slots::create()?), Arc::new(Zeros), options)?)
    };
    let servers = (0..servers).map(|_| serve()).collect::<std::result::Result<Vec<_>, _>>()?;
    let loop_options =
        LoopOptions { name: "burgeon/busy-readers", read_only: true, discard: false };
    let device = LoopDevice::attach(connection.open_file()?, loop_options)?;
    let path = device.path();
    let reads = thread::scope(|scope| {
        let readers: Vec<_> =
            (0..readers).map(|seed| scope.spawn(move || read(path, seed as u64, length))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap_or(Ok(0))).sum::<io::Result<u64>>()
    })?;
    device.detach(Duration::from_secs(10))?;
    for server in servers {
        server.stop(Duration::from_secs(1));
    }
    Ok(reads as f64 / length.as_secs_f64())
}

/// Reads at random for so long, after a warm-up of a tenth of it; gives the number of reads.
fn read(path: &Path, seed: u64, length: Duration) -> io::Result<u64> {
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let file: File = OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let mut block = Block([0; BLOCK_SIZE as usize]);
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let begun = Instant::now();
    let mut reads = 0;
    loop {
        let elapsed = begun.elapsed();
        if elapsed > length + length / 10 {
            return Ok(reads);
        }
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        file.read_exact_at(&mut block.0, state % (SIZE / BLOCK_SIZE) * BLOCK_SIZE)?;
        reads += u64::from(elapsed > length / 10);
    }
}
