//! A source that answers late, wrongly or not at all, and keeps account of it.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burgeon_block::{BlockSource, ByteRange, Error, ErrorKind, ObjectId, Result};
use burgeon_image::{AddressMap, decode_chunk};
use bytes::Bytes;
use testkit::Rng;

use crate::{Model, model::THROUGH};

/// How a source behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mood {
    /// Right answers, after a while.
    Calm,
    /// Errors now and then, and at most one wrong answer before a right one: nothing that a
    /// reader must notice.
    Flaky,
    /// Anything.
    Hostile,
    /// Errors only.
    Dead,
}

/// What a source did, as the volume's counters must have it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct SourceLog {
    /// Right answers that reached the volume.
    pub(crate) good: u64,
    /// Bytes of answers of the length asked for.
    pub(crate) bytes: u64,
    /// Errors, wrong lengths and silences.
    pub(crate) errors: u64,
    /// Wrong bytes of the right length.
    pub(crate) lies: u64,
    /// Questions for what is read straight through that were dropped unanswered: by a volume that
    /// lost patience, or with a reader that did.
    pub(crate) dropped: u64,
    /// Two readers asked for one chunk at a time.
    pub(crate) doubled: bool,
}

/// A simulated source; clones are the same one.
#[derive(Clone)]
pub struct FaultySource(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    mood: Mood,
    objects: HashMap<ObjectId, Vec<u8>>,
    map: Arc<AddressMap>,
    /// Questions whose last answer was a wrong one.
    wrong: HashSet<(ObjectId, ByteRange)>,
    under_way: HashSet<ByteRange>,
    log: SourceLog,
}

enum Answer {
    Good,
    Error(ErrorKind),
    Shorter,
    Longer,
    WrongBit,
    /// Bytes of another place, as an object that was replaced would give.
    Stale,
    Silence,
}

impl FaultySource {
    /// A calm source of `model`'s objects.
    pub fn new(seed: u64, model: &Model) -> Self {
        Self(Arc::new(Mutex::new(State {
            rng: Rng::new(seed),
            mood: Mood::Calm,
            objects: model.objects.iter().cloned().collect(),
            map: Arc::clone(&model.map),
            wrong: HashSet::new(),
            under_way: HashSet::new(),
            log: SourceLog::default(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it answers from now on.
    pub fn set_mood(&self, mood: Mood) {
        self.state().mood = mood;
    }

    pub(crate) fn mood(&self) -> Mood {
        self.state().mood
    }

    pub(crate) fn log(&self) -> SourceLog {
        self.state().log
    }
}

impl State {
    fn choose(&mut self, object: &ObjectId, question: ByteRange) -> Answer {
        let through = object.as_str() == THROUGH;
        let roll = self.rng.below(100);
        match (self.mood, roll) {
            (Mood::Calm, _) => Answer::Good,
            (Mood::Dead, _) => Answer::Error(ErrorKind::Unavailable),
            (Mood::Flaky, 0..20) => Answer::Error(ErrorKind::Unavailable),
            // Readers of one range of a file share no flight: a second wrong answer to one of
            // them could be the second to the same.
            (Mood::Flaky, 20..50)
                if !through && !self.wrong.contains(&(object.clone(), question)) =>
            {
                self.wrong_answer(roll)
            }
            (Mood::Hostile, 0..10) => Answer::Error(ErrorKind::Unavailable),
            (Mood::Hostile, 10..15) => Answer::Silence,
            (Mood::Hostile, 15..65) => self.wrong_answer(roll),
            _ => Answer::Good,
        }
    }

    fn wrong_answer(&mut self, roll: u64) -> Answer {
        match roll % 6 {
            0 => Answer::Error(ErrorKind::NotFound),
            1 => Answer::Error(ErrorKind::LocalIo),
            2 => Answer::Shorter,
            3 => Answer::Longer,
            4 => Answer::Stale,
            _ => Answer::WrongBit,
        }
    }

    fn good(&self, object: &ObjectId, question: ByteRange) -> Option<Vec<u8>> {
        let bytes = self.objects.get(object)?;
        bytes.get(question.start() as usize..question.end() as usize).map(<[u8]>::to_vec)
    }

    fn stale(&mut self, object: &ObjectId, question: ByteRange) -> Vec<u8> {
        let len = question.len() as usize;
        let bytes = self.objects.get(object).map_or(&[][..], Vec::as_slice);
        let start = self.rng.below((bytes.len() - len) as u64 + 1) as usize;
        bytes[start..start + len].to_vec()
    }

    /// Whether `answer` is what it should be. A flipped bit may be one that no decoder looks at.
    fn is_right(&self, object: &ObjectId, question: ByteRange, answer: &[u8]) -> bool {
        if object.as_str() == THROUGH {
            return self.good(object, question).as_deref() == Some(answer);
        }
        let mut chunks = (0..self.map.chunk_count()).map(|index| self.map.chunk(index));
        let chunk = chunks.find(|chunk| chunk.object == 0 && chunk.stored == question);
        chunk.is_some_and(|chunk| {
            let mut raw = vec![0; chunk.range.len() as usize];
            decode_chunk(chunk.codec, answer, &mut raw, &chunk.digest).is_ok()
        })
    }

    /// Notes an answer that now reaches the volume.
    fn deliver(&mut self, object: &ObjectId, question: ByteRange, answer: &Result<Bytes>) {
        let right_len = answer.as_ref().is_ok_and(|bytes| bytes.len() as u64 == question.len());
        match answer {
            Ok(bytes) if right_len => {
                self.log.bytes += question.len();
                if self.is_right(object, question, bytes) {
                    self.log.good += 1;
                    self.wrong.remove(&(object.clone(), question));
                    return;
                }
                self.log.lies += 1;
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                self.log.errors += 1;
                return;
            }
            _ => self.log.errors += 1,
        }
        self.wrong.insert((object.clone(), question));
    }
}

/// A question under way; dropped with the future that asked it.
struct Asking<'a> {
    source: &'a FaultySource,
    question: ByteRange,
    shared: bool,
    silent: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut state = self.source.state();
        if self.shared {
            state.under_way.remove(&self.question);
        }
        // The volume has lost patience.
        let silences = if self.shared { &mut state.log.errors } else { &mut state.log.dropped };
        *silences += u64::from(self.silent);
    }
}

impl BlockSource for FaultySource {
    async fn read(&self, object: &ObjectId, range: ByteRange) -> Result<Bytes> {
        let through = object.as_str() == THROUGH;
        let (answer, delay) = {
            let mut state = self.state();
            if !through && !state.under_way.insert(range) {
                state.log.doubled = true;
            }
            let delay = Duration::from_micros(state.rng.below(20_000));
            (state.choose(object, range), delay)
        };
        let mut asking = Asking { source: self, question: range, shared: !through, silent: false };
        tokio::time::sleep(delay).await;
        if matches!(answer, Answer::Silence) {
            asking.silent = true;
            std::future::pending::<()>().await;
        }
        let mut state = self.state();
        let missing = || Error::new(ErrorKind::NotFound, format!("no {range} in {object}"));
        let mut good = state.good(object, range).ok_or_else(missing)?;
        let answer = match answer {
            Answer::Error(kind) => Err(Error::new(kind, "simulated: the source fails")),
            Answer::Good | Answer::Silence => Ok(good),
            Answer::Shorter => {
                good.truncate(state.rng.below(range.len()) as usize);
                Ok(good)
            }
            Answer::Longer => {
                good.push(0);
                Ok(good)
            }
            Answer::WrongBit => {
                let at = state.rng.below(range.len()) as usize;
                good[at] ^= 1 << state.rng.below(8);
                Ok(good)
            }
            Answer::Stale => Ok(state.stale(object, range)),
        };
        let answer = answer.map(Bytes::from);
        state.deliver(object, range, &answer);
        drop(state);
        answer
    }
}
