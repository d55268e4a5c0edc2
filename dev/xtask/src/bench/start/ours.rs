//! Images of ours, in a store behind a web server.

use std::path::PathBuf;

use anyhow::Result;
use testkit::WebServer;

use super::{Image, Program, Stage, Start, Starts, bound, lazy_aim, mib};
use crate::bench::{
    burgeon::Burgeon,
    machine::run,
    median,
    table::{Aim, Table},
};

pub(super) struct Ours<'a> {
    stage: &'a Stage<'a>,
    web: WebServer,
    builder: Burgeon,
}

impl<'a> Ours<'a> {
    pub(super) fn make(stage: &'a Stage<'a>) -> Result<Self> {
        let served = stage.bench.path("served");
        let state = stage.bench.path("start-builder");
        let builder = Burgeon::with_store(&stage.bench.program, state, served.join("store"));
        builder.run(&["build", &stage.tree.to_string_lossy(), "plain"])?;
        let archive = served.join("tree.tar.zst");
        let pack = format!("tar -C {:?} -c . | zstd -3 -T0 -q -o {archive:?}", stage.tree);
        run("sh", &["-c", &pack])?;
        let web = WebServer::nginx(&served, &stage.bench.path("start-nginx"))?;
        Ok(Self { stage, web, builder })
    }

    /// Measures Burgeon's starts of the program; returns the share of the image that it reads.
    pub(super) fn measure(&self, program: &Program, table: &mut Table) -> Result<f64> {
        let profile = self.stage.record(program, &self.builder, "plain")?;
        let ordered = format!("ordered-{}", program.word());
        let (tree, file) = (self.stage.tree.to_string_lossy(), profile.to_string_lossy());
        self.builder.run(&["build", &tree, &ordered, "--profile", &file])?;
        let [mut unpacked, mut lazy, mut led, mut packed] = [(); 4].map(|()| Starts::default());
        let mut warm = vec![];
        for _ in 0..self.stage.bench.options.rounds {
            let web = self.web.address();
            unpacked.0.push(self.stage.unpack(program, web, "tree.tar.zst", "zstd -dc")?);
            lazy.0.push(self.mount(Some(program), "plain", "none")?);
            led.0.push(self.mount(Some(program), "plain", &file)?);
            packed.0.push(self.mount(Some(program), &ordered, "auto")?);
            warm.push(self.stage.warm(program)?);
        }
        let needed = self.mount(None, "plain", &file)?.bytes;
        let needed_packed = self.mount(None, &ordered, "auto")?.bytes;
        let (unpack, without) = (unpacked.seconds(), lazy.seconds());
        let (with, with_packed) = (led.seconds(), packed.seconds());
        let share = mib(needed) / mib(unpacked.0.last().map_or(1, |start| start.bytes));
        table.heading(format!(
            "Cold start at 20 ms and 200 Mbit/s: {} ({:.1} % of the image is read)",
            program.name,
            share * 100.0
        ));
        unpacked.row(table, "download and unpack (tar.zst)");
        lazy.row(table, "lazy, no profile");
        led.row(table, "lazy, profile");
        packed.row(table, "lazy, profile, built by it");
        let text =
            format!("{:.1} MiB needed; {:.2} s when all is in memory", mib(needed), median(&warm));
        table.row("bound", bound(needed), "s", Aim::None, text);
        let text = format!("{:.1} MiB needed", mib(needed_packed));
        table.row("bound, built by the profile", bound(needed_packed), "s", Aim::None, text);
        table.row("no profile ÷ download and unpack", without / unpack, "x", lazy_aim(share), "");
        table.row("profile ÷ bound", with / bound(needed), "x", Aim::AtMost(1.2), "");
        let ratio = with_packed / bound(needed_packed);
        table.row("profile, built by it ÷ bound", ratio, "x", Aim::AtMost(1.2), "");
        table.row("profile, built by it ÷ no profile", with_packed / without, "x", Aim::None, "");
        Ok(share)
    }

    /// The start from `image`, or the mount alone, until the profile's data has been
    /// prefetched.
    fn mount(&self, program: Option<&Program>, image: &str, profile: &str) -> Result<Start> {
        let link = self.stage.link(self.web.address())?;
        let store = PathBuf::from(format!("http://{}/store", link.address()));
        let options = ["--profile", profile];
        let image = Image { store: Some(store), name: image.to_owned(), options: &options };
        self.stage.mount(program, &link, &image)
    }
}
