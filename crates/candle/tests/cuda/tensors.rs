//! Arenas whose pool is candle's tensors.

use candle_core::{Device, Tensor};
use kvarena::testkit::rng::Rng;
use kvarena::{Capacity, Extend, KvDtype, Namespace, PoolConfig, TokenId};
use kvarena_candle::{Error, KvArena};

use crate::common::{DIM, KV_HEADS, LAYERS, Program, WRONG, attention, config, fused, numbers, packed};
use crate::device;

const PAGES: usize = 256;

/// Returns K and V of each layer, filled with a number. K of the first layer is the second half of a longer tensor.
fn tensors(device: &Device) -> Vec<[Tensor; 2]> {
    let tensor = |skipped: usize| {
        let shape = (skipped + PAGES, config().page_size as usize, KV_HEADS, DIM);
        let numbers = vec![7.0_f32; shape.0 * shape.1 * shape.2 * shape.3];
        let all = Tensor::from_vec(numbers, shape, device);
        all.and_then(|all| all.narrow(0, skipped, PAGES)).expect("memory")
    };
    (0..LAYERS).map(|layer| [tensor(if layer == 0 { PAGES } else { 0 }), tensor(0)]).collect()
}

#[test]
fn programs_over_tensors_are_exact() {
    let (Some(device), Some(second)) = (device(), device()) else { return };
    let others = [Device::Cpu, second];
    let mut rejected = [0; WRONG];
    for seed in 0..5 {
        let arena = KvArena::over(config(), &tensors(&device)).expect("memory of the pool");
        let some = Program::over(arena, &device, &others, 12, seed).run(20);
        rejected.iter_mut().zip(some).for_each(|(all, some)| *all += some);
    }
    assert!(rejected.iter().any(|&count| count > 0), "{rejected:?}");
}

/// The arena stores K and V in the tensors, where the model can read them, and nowhere else.
#[test]
fn rows_are_in_the_tensors() {
    let Some(device) = device() else { return };
    let layers = tensors(&device);
    let mut arena = KvArena::over(config(), &layers).expect("memory of the pool");
    let tokens: Vec<TokenId> = (0..3).map(TokenId::new).collect();
    let seq = arena.engine.admit(Namespace::default(), &tokens, 0).expect("room");
    let step = arena.step(&[Extend { seq, len: 3 }]).expect("room");
    let numbers = numbers(&mut Rng::new(1), 3);
    let [q, k, v] = fused(&numbers, &device);
    step.attend(1, &attention(), &q, &k, &v).expect("valid attention");
    let id = step.launched();
    arena.close(id).expect("it was launched");
    let page = arena.engine.page_table(seq).expect("it runs").next().expect("a page").index();
    for (layer, planes) in layers.iter().enumerate() {
        for (side, tensor) in planes.iter().enumerate() {
            let all = tensor.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("numbers");
            let first = page * config().page_size as usize * KV_HEADS * DIM;
            let (rows, len) = (packed(&numbers, 1 + side), 3 * KV_HEADS * DIM);
            let mut wanted = vec![7.0; all.len()];
            if layer == 1 {
                wanted[first..first + len].copy_from_slice(&rows);
            }
            assert!(all == wanted, "layer {layer}, side {side}");
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_rejected() {
    let (Some(device), Some(second)) = (device(), device()) else { return };
    let layers = tensors(&device);
    let error = |config: PoolConfig, layers: &[[Tensor; 2]]| KvArena::over(config, layers).err().expect("an error");
    let with = |tensor: Tensor| vec![layers[0].clone(), [layers[1][0].clone(), tensor]];
    let fewer = PoolConfig { capacity: Capacity::Pages(PAGES as u32 - 1), ..config() };
    assert!(matches!(error(fewer, &layers), Error::Shape { .. }));
    let turned = layers[1][1].transpose(0, 1).and_then(|x| x.transpose(0, 1)).expect("a view");
    assert!(KvArena::over(config(), &with(turned)).is_ok());
    let wide = Tensor::from_vec(vec![0.0_f32; PAGES * 4 * KV_HEADS * DIM * 2], (PAGES, 4, KV_HEADS, 2 * DIM), &device);
    let narrow = wide.and_then(|x| x.narrow(3, 0, DIM)).expect("a view");
    assert!(matches!(error(config(), &with(narrow)), Error::Strides { .. }));
    assert!(matches!(error(PoolConfig { dtype: KvDtype::F16, ..config() }, &layers), Error::Dtype { .. }));
    assert!(matches!(error(config(), &with(tensors(&second)[1][1].clone())), Error::Device { .. }));
    assert!(matches!(error(config(), &with(tensors(&Device::Cpu)[1][1].clone())), Error::Device { .. }));
    assert!(matches!(error(config(), &layers[..1]), Error::Engine(_)));
    assert!(matches!(error(config(), &with(layers[0][1].clone())), Error::Engine(_)));
    assert!(matches!(error(config(), &[]), Error::Device { .. }));
}
