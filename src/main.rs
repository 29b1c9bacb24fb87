use std::process::ExitCode;

fn main() -> ExitCode {
    reconvene::commands::main()
}
