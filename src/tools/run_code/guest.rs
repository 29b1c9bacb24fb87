//! The process that interprets code: `reconvene sandbox`, started by `sandbox` and by nobody else.
//!
//! It first takes from itself what it will not need: memory and processor time beyond the limits, files, processes. It has
//! no secret, no environment and no connection but the two pipes. The interpreter counts time and depth itself and ends the
//! code with an error that says where; the limits of the kernel are for what the interpreter does not count.

use super::{Answer, Said, Start, values};
use monty::{FunctionCall, MontyRun, RunProgress};
use monty_types::{
    CompileOptions, ExcType, ExtFunctionResult, MontyException, MontyObject, NameLookupResult,
    PrintWriter, PrintWriterCallback, ResourceLimits, ResourceTracker,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::{Map, Value};
use std::{
    borrow::Cow,
    io::{self, BufRead, Write},
    process::ExitCode,
    time::Duration,
};

/// Deep enough for the deepest recursion that the interpreter allows.
const STACK_BYTES: usize = 256 << 20;
const RECURSION_MAX: usize = 500;

/// The whole process. It fails where its other end is gone or speaks another language: then nobody listens.
pub fn main() -> ExitCode {
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
    let done = thread.spawn(serve).map(std::thread::JoinHandle::join);
    match done {
        Ok(Ok(Ok(()))) => ExitCode::SUCCESS,
        Ok(Ok(Err(_)) | Err(_)) | Err(_) => ExitCode::FAILURE,
    }
}

fn serve() -> io::Result<()> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let start: Start = serde_json::from_str(&line)?;
    confine(&start)?;
    let mut output = Output {
        text: String::new(),
        bytes_max: start.output_bytes,
    };
    let ended = run(start, &mut output).and_then(|result| {
        let result = values::to_json(&result);
        result.map_err(|fault| raise(ExcType::TypeError, format!("The result: {fault}.")))
    });
    let output = output.text;
    say(&match ended {
        Ok(result) => Said::Returned { result, output },
        Err(error) => Said::Raised {
            error: error.to_string(),
            output,
        },
    })
}

fn say(said: &Said) -> io::Result<()> {
    let mut line = serde_json::to_vec(said)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)?;
    out.flush()
}

/// From here on, whatever gets hold of the interpreter gets hold of little.
fn confine(start: &Start) -> io::Result<()> {
    let limit = |resource, most| {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit).map_err(io::Error::from)
    };
    let seconds = start.timeout_ms.div_ceil(1000) + 1;
    limit(Resource::Cpu, seconds)?;
    limit(Resource::Data, data_bytes()? + start.memory_bytes)?;
    limit(Resource::Fsize, 0)?;
    limit(Resource::Core, 0)?;
    // None that is not open yet; and none of us.
    limit(Resource::Nofile, 3)?;
    limit(Resource::Nproc, 0)
}

/// What this process takes already, its stacks among it.
fn data_bytes() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kilobytes = kilobytes.ok_or_else(|| io::Error::other("no VmData"))?;
    Ok(kilobytes * 1024)
}

fn run(start: Start, output: &mut Output) -> Result<MontyObject, MontyException> {
    let limits = ResourceLimits::default()
        .max_duration(Duration::from_millis(start.timeout_ms))
        .max_recursion_depth(RECURSION_MAX);
    let program = MontyRun::new(start.code, "code.py", vec![], CompileOptions::default())?;
    let mut print = PrintWriter::Callback(output);
    let mut progress = program.start(vec![], ResourceTracker::new(limits), print.reborrow())?;
    loop {
        progress = match progress {
            RunProgress::Complete(value) => return Ok(value),
            RunProgress::NameLookup(lookup) => {
                let known = start.functions.contains(&lookup.name);
                let found = known.then(|| MontyObject::Function {
                    name: lookup.name.clone(),
                    docstring: None,
                });
                lookup.resume(NameLookupResult::from(found), print.reborrow())?
            }
            RunProgress::FunctionCall(call) => {
                let answer = ask(&call);
                call.resume(answer, print.reborrow())?
            }
            RunProgress::OsCall(call) => {
                let refused =
                    "There are no files, no environment and no clock here. Use your tools.";
                let refused = raise(ExcType::PermissionError, refused.into());
                call.resume(ExtFunctionResult::Error(refused), print.reborrow())?
            }
            // Every call is answered before the code goes on.
            RunProgress::ResolveFutures(waiting) => {
                let refused = "Call tools without await.";
                return Err(waiting
                    .abort(
                        raise(ExcType::RuntimeError, refused.into()),
                        print.reborrow(),
                    )
                    .map_or_else(
                        |error| error,
                        |_| raise(ExcType::RuntimeError, refused.into()),
                    ));
            }
        };
    }
}

/// Has the other end carry out the call.
fn ask(call: &FunctionCall) -> ExtFunctionResult {
    let answered = arguments(call).and_then(|arguments| {
        let function = call.function_name.clone();
        let gone = |error: io::Error| raise(ExcType::RuntimeError, error.to_string());
        say(&Said::Call {
            function,
            arguments,
        })
        .map_err(gone)?;
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map_err(gone)?;
        let answer: Answer = serde_json::from_str(&line).map_err(|error| gone(error.into()))?;
        answer.map_err(|told| raise(ExcType::RuntimeError, told))
    });
    match answered {
        Ok(text) => ExtFunctionResult::Return(match serde_json::from_str(&text) {
            Ok(value) => values::from_json(value),
            Err(_) => MontyObject::String(text),
        }),
        Err(error) => ExtFunctionResult::Error(error),
    }
}

/// The arguments by name: keywords, or one dict.
fn arguments(call: &FunctionCall) -> Result<Map<String, Value>, MontyException> {
    let name = &call.function_name;
    let misfit = |fault: String| raise(ExcType::TypeError, format!("{name}: {fault}"));
    let pairs: Vec<(&MontyObject, &MontyObject)> = match (&call.args[..], &call.kwargs[..]) {
        ([], named) => named.iter().map(|(name, value)| (name, value)).collect(),
        ([MontyObject::Dict(pairs)], []) => pairs.iter().map(|(n, v)| (n, v)).collect(),
        _ => {
            return Err(misfit(format!(
                "give its arguments by name, as {name}(first=1, second=2)"
            )));
        }
    };
    let mut arguments = Map::new();
    for (argument, value) in pairs {
        let MontyObject::String(argument) = argument else {
            return Err(misfit("the names of arguments are texts".into()));
        };
        let value =
            values::to_json(value).map_err(|fault| misfit(format!("{argument}: {fault}")))?;
        arguments.insert(argument.clone(), value);
    }
    Ok(arguments)
}

fn raise(kind: ExcType, message: String) -> MontyException {
    MontyException::new(kind, Some(message))
}

/// What the code prints.
struct Output {
    text: String,
    bytes_max: usize,
}

impl Output {
    fn room_for(&self, more: usize) -> Result<(), MontyException> {
        match self.text.len() + more > self.bytes_max {
            true => Err(raise(
                ExcType::RuntimeError,
                format!("the code printed more than {} bytes", self.bytes_max),
            )),
            false => Ok(()),
        }
    }
}

impl PrintWriterCallback for Output {
    fn stdout_write(&mut self, output: Cow<'_, str>) -> Result<(), MontyException> {
        self.room_for(output.len())?;
        self.text.push_str(&output);
        Ok(())
    }

    fn stdout_push(&mut self, end: char) -> Result<(), MontyException> {
        self.room_for(end.len_utf8())?;
        self.text.push(end);
        Ok(())
    }
}
