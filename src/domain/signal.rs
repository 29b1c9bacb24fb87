//! Which await a signal belongs to.

use super::{ids::WorkspaceId, task_await::SourceType};
use std::collections::HashMap;

/// What a signal tells of and an await waits for: both name it alike, within one workspace (W-7).
pub type Thing<'a> = (WorkspaceId, SourceType, &'a str);

/// For each signal the place of the pending await that waits for the same thing; `None` where nobody does. There is at
/// most one (W-5).
pub fn pair<'a>(
    signals: &[Thing<'a>],
    awaits: impl IntoIterator<Item = Thing<'a>>,
) -> Vec<Option<usize>> {
    let waiting: HashMap<Thing<'_>, usize> = awaits
        .into_iter()
        .enumerate()
        .map(|(at, thing)| (thing, at))
        .collect();
    signals
        .iter()
        .map(|signal| waiting.get(signal).copied())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // W-7, D-31
    #[test]
    fn a_signal_finds_the_await_of_its_own_workspace_source_and_key_only() {
        let (a, b) = (WorkspaceId::new(), WorkspaceId::new());
        let signals = [
            (b, SourceType::ChildTask, "k"),
            (a, SourceType::External, "k"),
            (a, SourceType::ChildTask, "other"),
            (a, SourceType::ChildTask, "k"),
        ];
        let awaits = [
            (a, SourceType::ChildTask, "j"),
            (a, SourceType::ChildTask, "k"),
        ];
        assert_eq!(pair(&signals, awaits), [None, None, None, Some(1)]);
        assert_eq!(pair(&signals, []), [None; 4]);
    }
}
