//! Runs one test file: a VM of its own, its cases one after the other, each within its limits.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mlua::{AnyUserData, MultiValue, Value};

use crate::error::{ErrorKind, Fault};
use crate::set::PolicySet;
use crate::set::load::located;
use crate::test::assertions;
use crate::test::choices::{Choices, Tried, mix, shrink};
use crate::test::fleet::Kernels;
use crate::test::generator::Generator;
use crate::test::host::{Declared, Host, TestFile};
use crate::test::report::{CaseReport, FileReport, TestFailure};
use crate::test::{Found, TestOptions};
use crate::vm::budget::{Limit, thread_cpu_time};
use crate::vm::sandbox::{Sandbox, fault};

/// One case, all inputs of a property together.
pub const CASE_MAX: Duration = Duration::from_secs(2);
/// All cases of a file.
pub const TEST_FILE_MAX: Duration = Duration::from_secs(20);
/// Making a property's failing input smaller.
const SHRINK_MAX: Duration = Duration::from_secs(1);
/// Memory of a test's VM: a fleet of a thousand nodes, several times.
pub const TEST_VM_MAX_BYTES: usize = 64 << 20;
/// What the report calls a file that can't be run.
const WHOLE_FILE: &str = "the file loads";

/// All that is needed to run a file.
pub(crate) struct Run<'a> {
    pub(crate) set: Arc<PolicySet>,
    pub(crate) kernels: Option<Arc<dyn Kernels>>,
    pub(crate) options: &'a TestOptions,
    /// What all tests together may take.
    pub(crate) all: Option<Allowance>,
    /// What the files together did beside passing or failing.
    pub(crate) found: Found,
}

/// A test VM, and what its functions share.
struct TestVm {
    sandbox: Sandbox,
    host: Rc<Host>,
    generator: AnyUserData,
}

/// How long something may take. It is the clock's time, but a thread that doesn't get the processor for half of it has not
/// had its share, and goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    end: Instant,
    allowed: Duration,
    cpu_start: Duration,
}

impl Allowance {
    pub(crate) fn new(allowed: Duration) -> Allowance {
        Allowance {
            end: Instant::now() + allowed,
            allowed,
            cpu_start: thread_cpu_time(),
        }
    }

    fn left(&self) -> Duration {
        let clock = self.end.saturating_duration_since(Instant::now());
        let cpu_used = thread_cpu_time().saturating_sub(self.cpu_start);
        clock.max((self.allowed / 2).saturating_sub(cpu_used))
    }
}

/// How one call of a case ended.
enum Ended {
    Passed,
    Failed(Box<TestFailure>),
    /// The VM can't be trusted any more.
    Broken(Box<TestFailure>),
}

impl Run<'_> {
    /// Runs a file's cases. One that breaks its VM doesn't keep the others from running.
    pub(crate) fn file(&mut self, file: &TestFile) -> FileReport {
        let whole = Allowance::new(TEST_FILE_MAX);
        let mut report = FileReport {
            file: file.label.clone(),
            cases: Vec::new(),
        };
        let mut next = 0;
        loop {
            let start = Instant::now();
            let (vm, declared) = match self.load(file, self.left(&whole)) {
                Ok(loaded) => loaded,
                Err(failure) => {
                    report.cases.push(CaseReport {
                        name: WHOLE_FILE.to_owned(),
                        line: failure.line,
                        time: start.elapsed(),
                        runs: 1,
                        failure: Some(*failure),
                    });
                    return report;
                }
            };
            let mut broken = false;
            while let (Some(case), false) = (declared.get(next), broken) {
                next += 1;
                if self.options.wants(&file.label, &case.name) {
                    let (case, is_broken) = self.case(&vm, case, &whole);
                    report.cases.push(case);
                    broken = is_broken;
                }
            }
            self.found.take(&vm.host);
            if !broken {
                return report;
            }
        }
    }

    fn left(&self, file: &Allowance) -> Duration {
        let all = self.all.map_or(Duration::MAX, |all| all.left());
        file.left().min(all)
    }

    fn load(
        &self,
        file: &TestFile,
        left: Duration,
    ) -> Result<(TestVm, Vec<Declared>), Box<TestFailure>> {
        let set = Arc::clone(&self.set);
        let host = Rc::new(Host::new(
            set,
            self.kernels.clone(),
            self.options.dir.clone(),
            file.clone(),
            self.options.update_golden,
        ));
        let vm = TestVm::new(&host).map_err(|fault| Box::new(host.failure(&fault)))?;
        if left.is_zero() {
            return Err(Box::new(out_of_time(file)));
        }
        let limit = Limit::Clock(CASE_MAX.min(left));
        vm.sandbox
            .run_module(&file.key, limit)
            .map_err(|fault| Box::new(host.failure(&fault)))?;
        host.declaring.set(false);
        let declared = host.declared.take();
        Ok((vm, declared))
    }

    /// Runs a case, and says whether it broke the VM.
    fn case(&self, vm: &TestVm, case: &Declared, whole: &Allowance) -> (CaseReport, bool) {
        let start = Instant::now();
        let left = self.left(whole);
        let mut report = CaseReport {
            name: case.name.clone(),
            line: case.line,
            time: Duration::ZERO,
            runs: 0,
            failure: None,
        };
        if left.is_zero() {
            report.failure = Some(out_of_time(&vm.host.file));
            return (report, false);
        }
        let own = Allowance::new(CASE_MAX.min(left));
        let seed = case_seed(self.options.seed, &vm.host.file.key, &case.name);
        let mut broken = false;
        for input in 0..case.inputs.unwrap_or(1) {
            report.runs = input + 1;
            let choices = Choices::random(mix(seed.wrapping_add(input)));
            match vm.call(case, choices, &own, seed) {
                Ended::Passed => continue,
                Ended::Failed(failure) if case.inputs.is_some() => {
                    let smaller = self.shrink(vm, case, *failure, whole, seed);
                    report.failure = Some(TestFailure {
                        run: Some(input + 1),
                        ..smaller
                    });
                }
                Ended::Failed(failure) => report.failure = Some(*failure),
                Ended::Broken(failure) => {
                    report.failure = Some(*failure);
                    broken = true;
                }
            }
            break;
        }
        if let Some(failure) = &mut report.failure {
            // A VM without memory doesn't say where.
            failure.line = failure.line.or(case.line);
        }
        report.time = start.elapsed();
        (report, broken)
    }

    /// Looks for a smaller input that fails, and gives its failure.
    fn shrink(
        &self,
        vm: &TestVm,
        case: &Declared,
        failure: TestFailure,
        whole: &Allowance,
        seed: u64,
    ) -> TestFailure {
        let own = Allowance::new(SHRINK_MAX.min(self.left(whole)));
        let mut least = failure;
        let first = vm.host.choices.borrow().drawn.clone();
        shrink(first, |candidate| {
            if own.left().is_zero() {
                return Tried::Stop;
            }
            match vm.call(case, Choices::replay(candidate), &own, seed) {
                Ended::Passed => Tried::Passes,
                Ended::Failed(failure) => {
                    least = *failure;
                    Tried::Fails(vm.host.choices.borrow().drawn.clone())
                }
                Ended::Broken(_) => Tried::Stop,
            }
        });
        least
    }
}

impl TestVm {
    fn new(host: &Rc<Host>) -> Result<TestVm, Fault> {
        let sandbox = Sandbox::new(Arc::clone(&host.set.program))?;
        let install = || {
            let lua = &sandbox.lua;
            lua.set_memory_limit(TEST_VM_MAX_BYTES)?;
            let test = assertions::table(lua, host)?;
            test.set_readonly(true);
            let llmgw: mlua::Table = lua.globals().get("llmgw")?;
            llmgw.set_readonly(false);
            llmgw.raw_set("test", test)?;
            llmgw.set_readonly(true);
            lua.create_userdata(Generator(Rc::clone(host)))
        };
        let generator = install().map_err(|e| fault(&e))?;
        Ok(TestVm {
            sandbox,
            host: Rc::clone(host),
            generator,
        })
    }

    /// Calls a case's function once.
    fn call(&self, case: &Declared, choices: Choices, own: &Allowance, seed: u64) -> Ended {
        self.host.begin(&case.name, choices);
        let args = match case.inputs {
            Some(_) => MultiValue::from_iter([Value::UserData(self.generator.clone())]),
            None => MultiValue::new(),
        };
        // Never zero: the first look at the clock then ends it, and says so.
        let limit = Limit::Clock(own.left().max(Duration::from_millis(1)));
        let result = self.sandbox.call_multi(&case.function, args, limit, seed);
        let failed = self.host.case.borrow().failure.clone();
        let failed = failed.map(|failure| self.host.with_context(failure));
        match (result, failed) {
            (Err(fault), _) if fault.kind == ErrorKind::Budget => {
                let mut failure = self.host.failure(&fault);
                failure.message = match case.inputs {
                    Some(_) => format!(
                        "all inputs together took longer than {} s",
                        CASE_MAX.as_secs()
                    ),
                    None => format!("took longer than {} s", CASE_MAX.as_secs()),
                };
                Ended::Broken(Box::new(failure))
            }
            (Err(fault), _) if fault.kind == ErrorKind::Memory => {
                let mut failure = self.host.failure(&fault);
                failure.message =
                    format!("needs more than {} MiB of memory", TEST_VM_MAX_BYTES >> 20);
                Ended::Broken(Box::new(failure))
            }
            (_, Some(failure)) => Ended::Failed(Box::new(failure)),
            (Err(fault), None) => Ended::Failed(Box::new(self.host.failure(&fault))),
            (Ok(_), None) => Ended::Passed,
        }
    }
}

impl Host {
    /// A fault of the test itself, or of what it called.
    fn failure(&self, fault: &Fault) -> TestFailure {
        let error = located(&self.set.bundle, &self.file.label, &fault.message);
        let own = error.file == self.file.label;
        let expression = match error.line {
            Some(line) if own => self.expression(line),
            _ => error.text,
        };
        self.with_context(TestFailure {
            file: error.file,
            line: error.line,
            expression,
            message: error.reason,
            ..TestFailure::default()
        })
    }

    fn with_context(&self, failure: TestFailure) -> TestFailure {
        let case = self.case.borrow();
        TestFailure {
            decisions: case.decisions.concat(),
            input: case.draws.clone(),
            ..failure
        }
    }
}

fn out_of_time(file: &TestFile) -> TestFailure {
    TestFailure {
        file: file.label.clone(),
        message: "not run: the cases before it took all the time there is".to_owned(),
        ..TestFailure::default()
    }
}

/// Every case has inputs of its own, the same ones whatever else is run.
fn case_seed(seed: u64, key: &str, name: &str) -> u64 {
    // FNV-1a.
    let bytes = key.bytes().chain([0]).chain(name.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mix(seed ^ hash)
}
