//! What tokens cost. In whole numbers: a step's cost is rounded once, to the nearest millionth, and sums of steps are exact.

use crate::config::Price;
use crate::domain::decision::Usage;

/// Of one model call, or of several, in millionths of the currency.
pub fn cost_micros(price: &Price, usage: Usage) -> i64 {
    let cached = usage.cached_tokens.min(usage.input_tokens);
    let parts = [
        (usage.input_tokens - cached, price.input),
        (cached, price.cached_input.unwrap_or(price.input)),
        (usage.output_tokens, price.output),
    ];
    // A price is in millionths for a million tokens.
    let total: u128 = parts
        .into_iter()
        .map(|(tokens, price)| u128::from(tokens) * u128::from(price))
        .sum();
    i64::try_from((total + 500_000) / 1_000_000).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    // T-17
    #[test]
    fn costs_are_whole_millionths_rounded_once() {
        let price = |input, output, cached_input| Price {
            input,
            output,
            cached_input,
        };
        for (input, output, cached, price, expected) in [
            (0, 0, 0, price(1_250_000, 10_000_000, None), 0),
            // 1.25 and 10 for a million tokens
            (
                1_000_000,
                1_000_000,
                0,
                price(1_250_000, 10_000_000, None),
                11_250_000,
            ),
            (
                100,
                7,
                64,
                price(1_250_000, 10_000_000, Some(125_000)),
                36 * 125 / 100 + 8 + 70,
            ),
            (100, 7, 64, price(1_250_000, 10_000_000, None), 195),
            // more cached than sent, as a provider may say
            (10, 0, 11, price(1_000_000, 0, Some(100_000)), 1),
            // a tenth of a millionth for a token
            (4, 0, 0, price(100_000, 0, None), 0),
            (5, 0, 0, price(100_000, 0, None), 1),
            (
                u32::MAX,
                u32::MAX,
                0,
                price(1_000_000_000_000, 1_000_000_000_000, None),
                8_589_934_590_000_000,
            ),
        ] {
            let usage = Usage {
                input_tokens: input,
                output_tokens: output,
                cached_tokens: cached,
            };
            assert_eq!(cost_micros(&price, usage), expected, "{usage:?} {price:?}");
        }
    }
}
