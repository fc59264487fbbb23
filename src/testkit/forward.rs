//! Forwards calls of [`Backend`](crate::Backend) to an inner backend, for test doubles that change only some calls.

/// Implements the given calls of `Backend`. Each call forwards to the backend in a field, and maps its error. `types`
/// are the associated types except the error; `leases` are those and the calls of `SwapMemory`, and `states` the calls
/// of `StateBackend`. Parentheses enclose a field that contains the backend in a cell: `(inner.get_mut()): B`.
///
/// ```ignore
/// impl<B: Backend> Backend for Failing<B> {
///     type Error = Failed<B::Error>;
///     forward_backend!(inner: B, Failed::Inner; types, end, store_cache, rope_store, attend, swap_pages, synchronize);
///     // .. `begin`, `copy_pages` and the other calls that may fail.
/// }
/// ```
#[macro_export(local_inner_macros)]
macro_rules! forward_backend {
    ($field:ident: $inner:ty, $error:expr; $($call:ident),* $(,)?) => {
        $(forward_backend!(@$call ($field), $inner, $error);)*
    };
    ($field:tt: $inner:ty, $error:expr; $($call:ident),* $(,)?) => {
        $(forward_backend!(@$call $field, $inner, $error);)*
    };
    (@types ($($field:tt)+), $inner:ty, $error:expr) => {
        type Rows<'a> = <$inner as $crate::Backend>::Rows<'a>;
        type RowsMut<'a> = <$inner as $crate::Backend>::RowsMut<'a>;
        type Sinks<'a> = <$inner as $crate::Backend>::Sinks<'a>;
        type Lse<'a> = <$inner as $crate::Backend>::Lse<'a>;
    };
    (@begin ($($field:tt)+), $inner:ty, $error:expr) => {
        fn begin(&mut self, plan: &$crate::BatchPlan<'_>) -> Result<(), Self::Error> {
            self.$($field)+.begin(plan).map_err($error)
        }
    };
    (@end ($($field:tt)+), $inner:ty, $error:expr) => {
        fn end(&mut self, end: $crate::plan::StepEnd) {
            self.$($field)+.end(end);
        }
    };
    (@store_cache ($($field:tt)+), $inner:ty, $error:expr) => {
        fn store_cache(
            &mut self,
            plan: &$crate::BatchPlan<'_>,
            layer: $crate::LayerId,
            k: Self::Rows<'_>,
            v: Self::Rows<'_>,
        ) -> Result<(), Self::Error> {
            self.$($field)+.store_cache(plan, layer, k, v).map_err($error)
        }
    };
    (@rope_store ($($field:tt)+), $inner:ty, $error:expr) => {
        fn rope_store(
            &mut self,
            plan: &$crate::BatchPlan<'_>,
            layer: $crate::LayerId,
            rope: &$crate::backend::Rope<Self::Rows<'_>, Self::Sinks<'_>>,
            qkv: Self::RowsMut<'_>,
        ) -> Result<(), Self::Error> {
            self.$($field)+.rope_store(plan, layer, rope, qkv).map_err($error)
        }
    };
    (@attend ($($field:tt)+), $inner:ty, $error:expr) => {
        fn attend_queries(
            &mut self,
            plan: &$crate::BatchPlan<'_>,
            layer: $crate::LayerId,
            attend: &$crate::Attend,
            q: $crate::backend::Queries<Self::Rows<'_>, Self::Sinks<'_>>,
            out: Self::RowsMut<'_>,
            lse: Option<Self::Lse<'_>>,
        ) -> Result<(), Self::Error> {
            self.$($field)+.attend_queries(plan, layer, attend, q, out, lse).map_err($error)
        }
    };
    (@copy_pages ($($field:tt)+), $inner:ty, $error:expr) => {
        fn copy_pages(&mut self, copies: &[$crate::plan::PageCopy]) -> Result<(), Self::Error> {
            self.$($field)+.copy_pages(copies).map_err($error)
        }
    };
    (@compact ($($field:tt)+), $inner:ty, $error:expr) => {
        fn compact(&mut self, compactions: &[$crate::plan::Compaction]) -> Result<(), Self::Error> {
            self.$($field)+.compact(compactions).map_err($error)
        }
    };
    (@save_pages ($($field:tt)+), $inner:ty, $error:expr) => {
        fn save_pages(
            &mut self,
            id: $crate::id::MoveId,
            moves: &[$crate::plan::PageMove],
        ) -> Result<(), Self::Error> {
            self.$($field)+.save_pages(id, moves).map_err($error)
        }
    };
    (@load_pages ($($field:tt)+), $inner:ty, $error:expr) => {
        fn load_pages(
            &mut self,
            id: $crate::id::MoveId,
            moves: &[$crate::plan::PageMove],
        ) -> Result<(), Self::Error> {
            self.$($field)+.load_pages(id, moves).map_err($error)
        }
    };
    (@moved ($($field:tt)+), $inner:ty, $error:expr) => {
        fn moved(&mut self) -> Result<$crate::backend::Moved, Self::Error> {
            self.$($field)+.moved().map_err($error)
        }
    };
    (@leases ($($field:tt)+), $inner:ty, $error:expr) => {
        type Read = <$inner as $crate::backend::SwapMemory>::Read;
        type Write = <$inner as $crate::backend::SwapMemory>::Write;

        fn lease(&mut self, page: $crate::id::SwapPageId) -> Self::Read {
            self.$($field)+.lease(page)
        }

        fn lease_mut(&mut self, page: $crate::id::SwapPageId) -> Self::Write {
            self.$($field)+.lease_mut(page)
        }
    };
    (@states ($($field:tt)+), $inner:ty, $error:expr) => {
        fn copy_states(&mut self, plan: &$crate::BatchPlan<'_>) -> Result<(), Self::Error> {
            self.$($field)+.copy_states(plan).map_err($error)
        }
    };
    (@swap_pages ($($field:tt)+), $inner:ty, $error:expr) => {
        fn swap_pages(&self) -> u32 {
            self.$($field)+.swap_pages()
        }
    };
    (@synchronize ($($field:tt)+), $inner:ty, $error:expr) => {
        fn synchronize(&mut self) -> Result<(), Self::Error> {
            self.$($field)+.synchronize().map_err($error)
        }
    };
}

/// Implements the buffers of `TestBackend` by those of an inner backend, which the expression returns.
#[macro_export]
macro_rules! forward_buffers {
    ($this:ident: $inner:ty => $backend:expr) => {
        type Input = <$inner as $crate::testkit::contract::TestBackend>::Input;
        type Output = <$inner as $crate::testkit::contract::TestBackend>::Output;
        type Sums = <$inner as $crate::testkit::contract::TestBackend>::Sums;

        fn input(&mut self, rows: &$crate::testkit::contract::HostRows) -> Self::Input {
            let $this = self;
            $backend.input(rows)
        }

        fn rows(input: &Self::Input) -> Self::Rows<'_> {
            <$inner>::rows(input)
        }

        fn sinks(input: &Self::Input) -> Self::Sinks<'_> {
            <$inner>::sinks(input)
        }

        fn output(&mut self, poison: &$crate::testkit::contract::HostRows) -> Self::Output {
            let $this = self;
            $backend.output(poison)
        }

        fn rows_mut(output: &mut Self::Output) -> Self::RowsMut<'_> {
            <$inner>::rows_mut(output)
        }

        fn read_output(&mut self, output: &Self::Output) -> Vec<f32> {
            let $this = self;
            $backend.read_output(output)
        }

        fn sums(&mut self, len: usize) -> Self::Sums {
            let $this = self;
            $backend.sums(len)
        }

        fn lse(sums: &mut Self::Sums) -> Self::Lse<'_> {
            <$inner>::lse(sums)
        }

        fn read_sums(&mut self, sums: &Self::Sums) -> Vec<f32> {
            let $this = self;
            $backend.read_sums(sums)
        }
    };
}
