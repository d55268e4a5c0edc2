//! The first pod of an image on a node that has nothing, and further ones.

use anyhow::{Context, Result, ensure};

use super::{
    Site,
    node::{Form, Job, Node, Profile, Times},
};
use crate::bench::{
    median,
    start::{
        mib,
        oci_images::NAME,
        programs::{PROGRAMS, Program},
    },
    table::{Aim, Table},
};

/// Warm pods of each cold one; the median counts.
const WARM: usize = 3;

/// A node's snapshotter, and if it has recorded a profile earlier.
struct Contender {
    form: Form,
    has_profile: bool,
}

const OVERLAYFS: usize = 0;
const STARGZ: usize = 1;
const CONTENDERS: [Contender; 6] = [
    Contender { form: Form::Overlayfs, has_profile: false },
    Contender { form: Form::Stargz, has_profile: false },
    Contender { form: Form::Overlay, has_profile: false },
    Contender { form: Form::Native, has_profile: false },
    Contender { form: Form::Overlay, has_profile: true },
    Contender { form: Form::Native, has_profile: true },
];

/// Aims of a pod without and with a profile, as parts of stargz-snapshotter's (geometric mean and
/// the largest one), and of overlayfs's pull.
const MEAN: [f64; 2] = [0.95, 0.8];
const LARGEST: [Aim; 2] = [Aim::AtMost(1.15), Aim::None];
const OF_PULL: [f64; 2] = [0.4, 0.2];

impl Contender {
    fn name(&self) -> String {
        let profile = match (self.form, self.has_profile) {
            (Form::Overlayfs | Form::Stargz, _) => "",
            (_, false) => ", no profile",
            (_, true) => ", profile",
        };
        format!("{}{profile}", self.form.name())
    }

    /// Overlayfs unpacks gzip; the others mount eStargz.
    fn tag(&self) -> &'static str {
        if self.form == Form::Overlayfs { "gzip" } else { "estargz" }
    }
}

/// The pods of a contender with one program.
#[derive(Default)]
struct Pods {
    cold: Vec<Times>,
    /// Bytes and requests over the link of the last cold one.
    passed: (u64, u64),
    /// Seconds of warm ones.
    warm: Vec<f64>,
    /// Of these, without the sandbox.
    warm_container: Vec<f64>,
    /// The last warm one.
    last_warm: Option<Times>,
}

/// The starts of a program: by contenders.
type Starts = [Pods; CONTENDERS.len()];

pub(super) fn measure(site: &Site<'_>, table: &mut Table) -> Result<()> {
    let profiles = site.profiles()?;
    let chosen = &site.stage.bench.options.programs;
    let mut all: Vec<(&Program, Starts)> = Vec::new();
    let is_chosen =
        |program: &Program| chosen.is_empty() || chosen.contains(&program.word().into());
    for (program, profile) in PROGRAMS.iter().zip(&profiles).filter(|(it, _)| is_chosen(it)) {
        let mut starts = Starts::default();
        for round in 0..site.stage.bench.options.rounds {
            for (contender, pods) in CONTENDERS.iter().zip(&mut starts) {
                eprintln!("  {}, round {}: {}", program.word(), round + 1, contender.name());
                one(site, contender, program, profile, pods).with_context(|| {
                    format!("starting {} on {}", program.name, contender.name())
                })?;
            }
        }
        rows_of(program, &starts, table);
        all.push((program, starts));
    }
    summary(&all, table);
    Ok(())
}

/// Starts a program on a new node: the first pod, then more of them.
fn one(
    site: &Site<'_>,
    contender: &Contender,
    program: &Program,
    profile: &Profile,
    pods: &mut Pods,
) -> Result<()> {
    let node = Node::start(site, contender.form, contender.has_profile.then_some(profile))?;
    let link = site.stage.link(site.registry.address())?;
    let image = format!("{}/{NAME}:{}", link.address(), contender.tag());
    let job = Job {
        user: program.user,
        command: program.command,
        ready: program.ready.unwrap_or_default(),
    };
    let cold = node.pod("cold", &image, true, &job)?;
    pods.passed = (link.bytes(), link.requests());
    check_kinds(&node, contender.form)?;
    node.remove(&cold)?;
    pods.cold.push(cold);
    if contender.has_profile {
        return Ok(());
    }
    let mut warm = Vec::new();
    for at in 0..WARM {
        let one = node.pod(&format!("warm-{at}"), &image, false, &job)?;
        node.remove(&one)?;
        warm.push(one);
    }
    let of = |of: fn(&Times) -> f64| median(&warm.iter().map(of).collect::<Vec<_>>());
    pods.warm.push(of(Times::of_warm_pod));
    pods.warm_container.push(of(|one| one.of_warm_pod() - one.sandbox));
    pods.last_warm = warm.pop();
    Ok(())
}

/// A layer that was unpacked after all, or a container of another form, would count as ours.
fn check_kinds(node: &Node<'_>, form: Form) -> Result<()> {
    let wanted = match form {
        Form::Overlayfs | Form::Stargz => return Ok(()),
        Form::Overlay => "overlay",
        Form::Native => "native",
    };
    let kinds = node.kinds()?;
    let has = |kind: &str| kinds.iter().any(|it| it == kind);
    ensure!(has("remote") && has(wanted), "no {wanted} container on a remote layer: {kinds:?}");
    Ok(())
}

/// The median of the ratios of each round.
fn ratio(of: &[f64], to: &[f64]) -> f64 {
    median(&of.iter().zip(to).map(|(of, to)| of / to).collect::<Vec<_>>())
}

fn colds(pods: &Pods) -> Vec<f64> {
    pods.cold.iter().map(Times::of_cold_pod).collect()
}

fn rows_of(program: &Program, starts: &Starts, table: &mut Table) {
    table.heading(format!("A cold pod at 20 ms and 200 Mbit/s: {}", program.name));
    for (contender, pods) in CONTENDERS.iter().zip(starts) {
        let part = |of: fn(&Times) -> f64| median(&pods.cold.iter().map(of).collect::<Vec<_>>());
        let note = format!(
            "pull {:.2}, create {:.2}, start {:.2}, ready {:.2}; {:.1} MiB, {} requests",
            part(|it| it.pull),
            part(|it| it.create),
            part(|it| it.start),
            part(|it| it.ready),
            mib(pods.passed.0),
            pods.passed.1
        );
        table.row(contender.name(), median(&colds(pods)), "s", Aim::None, note);
    }
    for (contender, pods) in CONTENDERS.iter().zip(starts).skip(STARGZ + 1) {
        let aim = LARGEST[usize::from(contender.has_profile)];
        let what = format!("{} ÷ stargz-snapshotter", contender.name());
        table.row(what, ratio(&colds(pods), &colds(&starts[STARGZ])), "x", aim, "");
    }
    table.heading(format!("A warm pod: {}", program.name));
    let overlayfs = &starts[OVERLAYFS];
    for (contender, pods) in CONTENDERS.iter().zip(starts).filter(|(_, it)| !it.warm.is_empty()) {
        let mut note = format!("{:.2} s without its sandbox", median(&pods.warm_container));
        if let Some(last) = &pods.last_warm {
            let Times { create, start, ready, .. } = last;
            note += &format!("; one of create {create:.2}, start {start:.2}, ready {ready:.2}");
        }
        table.row(contender.form.name(), median(&pods.warm), "s", Aim::None, note);
    }
    for (contender, pods) in CONTENDERS.iter().zip(starts).filter(|(_, it)| !it.warm.is_empty()) {
        let aim = match contender.form {
            Form::Overlayfs => continue,
            Form::Stargz => Aim::None,
            Form::Overlay => Aim::AtMost(1.1),
            Form::Native => Aim::AtMost(1.5),
        };
        let container = ratio(&pods.warm_container, &overlayfs.warm_container);
        let note = format!("{container:.2} without its sandbox");
        let what = format!("{} ÷ overlayfs", contender.form.name());
        table.row(what, ratio(&pods.warm, &overlayfs.warm), "x", aim, note);
    }
}

fn summary(all: &[(&Program, Starts)], table: &mut Table) {
    table.heading("A cold pod: geometric means over the programs");
    let mean = |of: &dyn Fn(&Starts) -> f64| {
        let sum: f64 = all.iter().map(|(_, starts)| of(starts).ln()).sum();
        (sum / all.len() as f64).exp()
    };
    for (at, contender) in CONTENDERS.iter().enumerate().skip(STARGZ + 1) {
        let led = usize::from(contender.has_profile);
        let of_stargz = mean(&|it| ratio(&colds(&it[at]), &colds(&it[STARGZ])));
        let what = format!("{} ÷ stargz-snapshotter", contender.name());
        table.row(what, of_stargz, "x", Aim::AtMost(MEAN[led]), "");
        let pulls = |it: &Starts| it[OVERLAYFS].cold.iter().map(|it| it.pull).collect::<Vec<_>>();
        let of_pull = mean(&|it| ratio(&colds(&it[at]), &pulls(it)));
        let what = format!("{} ÷ the pull of overlayfs", contender.name());
        table.row(what, of_pull, "x", Aim::AtMost(OF_PULL[led]), "");
    }
}
