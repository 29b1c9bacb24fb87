//! Samples, rows, the table and the JSON.

use serde_json::{Value, json};
use std::fmt::Write;

/// Repeated measurements of one thing.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The value below which `share` (0 to 1) of the samples are; NaN without samples.
    pub fn quantile(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        let at = (share * last as f64).round() as usize;
        self.0.get(at).copied().unwrap_or(f64::NAN)
    }

    pub fn median(&self) -> f64 {
        match self.0.len() {
            n if n > 0 && n % 2 == 0 => (self.0[n / 2 - 1] + self.0[n / 2]) / 2.0,
            _ => self.quantile(0.5),
        }
    }

    fn spread(&self) -> String {
        match self.0.len() {
            0 | 1 => String::new(),
            _ => format!(
                "{} to {}",
                number(self.quantile(0.0)),
                number(self.quantile(1.0))
            ),
        }
    }
}

/// What a value must be.
#[derive(Clone, Copy, Debug)]
pub enum Target {
    AtMost(f64),
    AtLeast(f64),
}

impl Target {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtMost(limit) => value <= limit,
            Self::AtLeast(limit) => value >= limit,
        }
    }

    fn limit(self) -> f64 {
        match self {
            Self::AtMost(limit) | Self::AtLeast(limit) => limit,
        }
    }
}

#[derive(Clone, Debug)]
struct Row {
    workload: &'static str,
    what: String,
    value: f64,
    unit: &'static str,
    spread: String,
    samples: usize,
    target: Option<Target>,
}

#[derive(Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// A measurement: its median, with the lowest and highest sample.
    pub fn measured(
        &mut self,
        workload: &'static str,
        what: impl Into<String>,
        samples: &Samples,
        unit: &'static str,
    ) {
        self.rows.push(Row {
            workload,
            what: what.into(),
            value: samples.median(),
            unit,
            spread: samples.spread(),
            samples: samples.0.len(),
            target: None,
        });
    }

    /// A figure made from measurements.
    pub fn figure(
        &mut self,
        workload: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
    ) {
        self.measured(workload, what, &Samples::of([value]), unit);
    }

    /// A figure that has to reach something.
    pub fn judged(
        &mut self,
        workload: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        target: Target,
    ) {
        self.figure(workload, what, value, unit);
        if let Some(row) = self.rows.last_mut() {
            row.target = Some(target);
        }
    }

    pub fn misses(&self) -> usize {
        self.rows
            .iter()
            .filter(|r| r.target.is_some_and(|t| !t.is_met(r.value)))
            .count()
    }

    pub fn table(&self) -> String {
        let mut text = String::new();
        let width = self
            .rows
            .iter()
            .map(|r| r.what.chars().count())
            .max()
            .unwrap_or(0);
        // Writing to a string can not fail.
        let _ = writeln!(
            text,
            "      {:width$}      value              target  ratio        lowest to highest",
            ""
        );
        let mut last = "";
        for row in &self.rows {
            let name = if row.workload == last {
                ""
            } else {
                row.workload
            };
            last = row.workload;
            let (target, ratio, verdict) = match row.target {
                None => Default::default(),
                Some(target) => {
                    let sign = match target {
                        Target::AtMost(_) => "<=",
                        Target::AtLeast(_) => ">=",
                    };
                    (
                        format!("{sign} {}", number(target.limit())),
                        format!("{:.2}", row.value / target.limit()),
                        if target.is_met(row.value) {
                            "PASS"
                        } else {
                            "MISS"
                        },
                    )
                }
            };
            let line = format!(
                "{name:5} {:width$} {:>10} {:8} {target:>10} {ratio:>6}  {verdict:6}{}",
                row.what,
                number(row.value),
                row.unit,
                row.spread
            );
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }

    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|r| {
            json!({
                "workload": r.workload, "what": r.what, "value": r.value, "unit": r.unit, "spread": r.spread,
                "samples": r.samples, "target": r.target.map(Target::limit),
                "target_is": r.target.map(|t| match t { Target::AtMost(_) => "at_most", Target::AtLeast(_) => "at_least" }),
                "pass": r.target.map(|t| t.is_met(r.value)),
            })
        });
        json!({"rows": rows.collect::<Vec<_>>(), "misses": self.misses()})
    }
}

/// Three digits that matter.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 || v == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}
