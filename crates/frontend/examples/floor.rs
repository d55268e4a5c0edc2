//! The floor under every measurement: a computed device behind FUSE and a loop device, for `fio`
//! by hand. As root:
//!
//! ```text
//! cargo run --release -p burgeon-frontend --example floor -- [threads]
//! fio --name=floor --filename=/dev/loopN --readonly --direct=1 --rw=randread --bs=4k \
//!     --size=8G --time_based --runtime=5 --ioengine=psync
//! ```
//!
//! It prints the loop device's path, serves until its input ends, and leaves nothing behind.

use std::{io, sync::Arc, time::Duration};

use burgeon_block::{BLOCK_SIZE, BlockDevice, Now, Result, Shape};
use burgeon_frontend::{Connection, LoopDevice, LoopOptions, ServeOptions, Slots, serve};

/// Blocks that hold their own number: all that a read costs is the way to the device.
struct Numbers;

impl BlockDevice for Numbers {
    fn shape(&self) -> Shape {
        Shape::read_only(1 << 40)
    }

    fn try_read(&self, offset: u64, buf: &mut [u8]) -> Result<Now> {
        for (index, block) in (0..).zip(buf.chunks_exact_mut(BLOCK_SIZE as usize)) {
            let number = (offset / BLOCK_SIZE + index).to_le_bytes();
            block.as_chunks_mut().0.fill(number);
        }
        Ok(Now::Served)
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.try_read(offset, buf).map(|_| ())
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build()?;
    let mut options = ServeOptions::new(runtime.handle().clone());
    if let Some(threads) = std::env::args().nth(1) {
        options.threads = threads.parse()?;
    }
    let slots = Arc::new(Slots::create()?);
    let connection = Connection::new("burgeon-floor")?;
    let fuse = connection.device().try_clone_to_owned()?;
    let server = serve(fuse, slots.clone(), Arc::new(Numbers), &options)?;
    let loop_options = LoopOptions { name: "burgeon/floor", read_only: true, discard: false };
    let device = LoopDevice::attach(connection.open_file()?, loop_options)?;
    println!("{} with {} threads; end the input to stop", device.path().display(), options.threads);

    io::copy(&mut io::stdin(), &mut io::sink())?;
    device.detach(Duration::from_secs(10))?;
    server.stop(Duration::from_secs(1));
    let counters = slots.counters();
    let latency = counters.hit_latency.snapshot();
    let reads = counters.hits.get();
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let cpu_ns = cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64;
    println!("{reads} reads, {} bytes", counters.hit_bytes.get());
    println!("{} ns of the server's CPU time a read", cpu_ns / reads.max(1));
    for (name, q) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99)] {
        println!("{name}: {} ns in the server", latency.quantile(q).unwrap_or(0));
    }
    Ok(())
}
